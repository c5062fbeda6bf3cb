"""A namespace is made of everything that the installed vLLM is configured with, less what the
tables call harmless.
"""

import copy
import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
import vllm.config
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvhold.core.config import ClientConfig, Config, load_config
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.naming import Table
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.geometry import geometry_of
from kvhold.integrations.vllm.namespace import namespace_of
from kvhold.integrations.vllm.naming import environment, tables, walk
from kvhold.integrations.vllm.naming.places import check_weights
from kvhold.integrations.vllm.naming.walk import engine_facts
from kvhold.integrations.vllm.releases import EARLIER_ENVIRONMENT, EARLIER_FIELDS
from kvhold.integrations.weights import code_identity, model_identity
from kvhold.node import NodeClient
from tests.vllm.scheduling import (
    LAYERS,
    NodeProcess,
    Options,
    make_config,
    make_folder,
    make_kv_config,
)

pytestmark = pytest.mark.vllm


def digest(config: VllmConfig, kv: KVCacheConfig | None = None, **settings: Any) -> bytes:
    return engine_facts(
        config, kv or make_kv_config(Options(Path("unused"))), load_config(settings, environ={})
    ).digest


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Made once; a test changes what it gets of `changed`."""
    return make_config(
        Options(make_folder(tmp_path_factory.mktemp("named") / "model")), Path("unused")
    )


@pytest.fixture
def config(engine: VllmConfig) -> VllmConfig:
    return copy.deepcopy(engine)


def config_classes() -> Iterator[type]:
    """Every dataclass of vLLM's configuration, and those that describe KV."""
    for module in pkgutil.iter_modules(vllm.config.__path__):
        for kind in vars(importlib.import_module(f"vllm.config.{module.name}")).values():
            if (
                inspect.isclass(kind)
                and dataclasses.is_dataclass(kind)
                and kind.__module__.startswith("vllm.config")
            ):
                yield kind
    yield from (kv_cache_interface.KVCacheConfig, kv_cache_interface.KVCacheGroupSpec)


CLASSES = {kind.__name__: kind for kind in config_classes()}


class TestEveryFieldIsClassified:
    """One that fails here is new: decide whether it may shape KV, and put it into tables.py with
    the reason.
    """

    @pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
    def test_of_a_class(self, kind: type) -> None:
        if kind.__name__ in tables.WHOLE_HARMLESS:
            return
        table = tables.TABLES[kind.__name__] | EARLIER_FIELDS.get(kind.__name__, Table.of())
        known = table.named | table.harmless.keys()
        declared = {f.name for f in dataclasses.fields(kind)}
        assert declared <= known, "unclassified"

    def test_of_a_real_configuration(self, config: VllmConfig) -> None:
        """Attributes that are no fields, too."""
        for name, value in vars(config).items():
            table = tables.TABLES.get(type(value).__name__)
            if table is not None:
                table |= EARLIER_FIELDS.get(type(value).__name__, Table.of())
                known = table.named | table.harmless.keys()
                assert {n for n in vars(value) if not n.startswith("__")} <= known, name

    def test_no_class_is_called_harmless_and_reached_by_a_named_field(
        self, config: VllmConfig
    ) -> None:
        reached = {
            text.rpartition(".")[2]
            for _, text in engine_facts(config, make_kv_config(Options(Path("x"))), Config()).items
        }
        assert not reached & tables.WHOLE_HARMLESS

    def test_of_vllms_environment(self) -> None:
        earlier = EARLIER_ENVIRONMENT.named | EARLIER_ENVIRONMENT.harmless.keys()
        listed = (
            environment.NAMED
            | earlier
            | {name for names in environment.HARMLESS.values() for name in names.split()}
        )
        assert set(envs.environment_variables) <= listed, "unclassified"
        assert not environment.NAMED & {
            name for names in environment.HARMLESS.values() for name in names.split()
        }

    def test_each_reason_is_one_of_the_groups(self) -> None:
        found = {reason for table in tables.TABLES.values() for reason in table.harmless.values()}
        assert found <= set(tables.REASONS)


def other(value: Any) -> Any:
    """A value of the same type that differs; plain values alone."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next((item for item in type(value) if item is not value), "another")
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, "x"]
    if isinstance(value, dict):
        return {**value, "x": 1}
    if isinstance(value, set):
        return {*value, "x"}
    if isinstance(value, torch.dtype):
        return torch.float16 if value != torch.float16 else torch.float64
    return 7 if value is None else None


SECTIONS = [
    *(
        "model_config",
        "cache_config",
        "parallel_config",
        "scheduler_config",
        "device_config",
        "load_config",
        "offload_config",
    ),
    *(
        "attention_config",
        "aux_output_config",
        "mamba_config",
        "kernel_config",
        "compilation_config",
        "kv_transfer_config",
    ),
    *("ec_manager_config",),
]


class TestFlips:
    @pytest.mark.parametrize("section", SECTIONS)
    def test_each_named_field_changes_the_digest_and_no_harmless_one_does(
        self, config: VllmConfig, section: str
    ) -> None:
        part = getattr(config, section)
        table = tables.TABLES[type(part).__name__]
        before = digest(config)
        names = sorted(n for n in table.named | table.harmless.keys() if hasattr(part, n))
        assert names
        for name in names:
            value = getattr(part, name)
            if dataclasses.is_dataclass(value):
                changed: Any = None
            else:
                changed = other(value)
            object.__setattr__(part, name, changed)
            assert (digest(config) != before) == (name in table.named), name
            object.__setattr__(part, name, value)
        assert digest(config) == before

    def test_each_setting_of_the_model_changes_the_digest(self, config: VllmConfig) -> None:
        hf, before = config.model_config.hf_config, digest(config)
        table = tables.TABLES["PreTrainedConfig"]
        for name, value in list(vars(hf).items()):
            if name in table.harmless or dataclasses.is_dataclass(value):
                continue
            hf.__dict__[name] = other(value)
            assert digest(config) != before, name
            hf.__dict__[name] = value
        hf.__dict__["something_new"] = 1
        assert digest(config) != before

    @pytest.mark.parametrize("name", sorted(environment.NAMED))
    def test_each_named_variable_changes_the_facts(self, name: str) -> None:
        values = [
            environment.environment_facts(environ) for environ in ({}, {name: "0"}, {name: "1"})
        ]
        assert values[0] != values[1] != values[2] != values[0]

    def test_harmless_variables_and_those_of_others_do_not(self) -> None:
        harmless = {name: "x" for names in environment.HARMLESS.values() for name in names.split()}
        assert (
            environment.environment_facts(
                {"HOME": "/root", "PATH": "/bin", "OMP_NUM_THREADS": "4", **harmless}
            )
            == {}
        )

    def test_what_a_worker_on_a_cpu_sets_at_each_start_is_not_named(self) -> None:
        """The address of this start (vllm/v1/worker/cpu_worker.py)."""
        assert environment.environment_facts({"VLLM_DIST_IDENT": "54321"}) == {}

    def test_a_variable_of_vllms_that_nobody_knows_is_named(self) -> None:
        assert environment.environment_facts({"VLLM_FROM_THE_FUTURE": "1"}) == {
            "environment.VLLM_FROM_THE_FUTURE": "'1'"
        }

    def test_a_field_that_nobody_knows_is_named(self, config: VllmConfig) -> None:
        before = digest(config)
        object.__setattr__(config.cache_config, "from_the_future", 1)
        assert digest(config) != before

    def test_versions_and_processor(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = {digest(config)}
        monkeypatch.setattr(vllm, "__version__", "0.32.1")
        found.add(digest(config))
        monkeypatch.setattr(torch, "__version__", "2.13.1")
        found.add(digest(config))
        monkeypatch.setattr(walk, "processor_facts", lambda: {"cpu.maker": "'another'"})
        found.add(digest(config))
        assert len(found) == 4


class TestNoPlainValue:
    @pytest.mark.parametrize("value", [object(), lambda: None, {"a": [object()]}, print, int])
    def test_is_refused_by_name(self, config: VllmConfig, value: Any) -> None:
        config.additional_config = {"hook": value}
        with pytest.raises(LayoutError, match=r"vllm\.additional_config.*no plain value"):
            digest(config)

    def test_can_be_shared(self, config: VllmConfig) -> None:
        config.additional_config = {"hook": print}
        assert digest(config, share=["vllm.additional_config"])

    def test_a_value_that_contains_itself_is_refused(self, config: VllmConfig) -> None:
        inside: list[Any] = []
        inside.append(inside)
        config.additional_config = {"hook": inside}
        with pytest.raises(LayoutError, match="contains itself"):
            digest(config)


class TestRecurrentStates:
    """A1: states of equal size and kind that are other bytes.

    Shapes by vLLM's own calculator, as Qwen3-Next has them.
    """

    def kv(self, dtypes: tuple[torch.dtype, ...]) -> KVCacheConfig:
        shapes = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
            1, 16, 32, 128, 128, 4, 0
        )
        state = MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
        return KVCacheConfig(
            num_blocks=8,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), state)],
        )

    def test_shapes_dtypes_and_layouts_are_named(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found, sizes = set(), set()
        bf16, fp16 = torch.bfloat16, torch.float16
        plain = self.kv((bf16, bf16))
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
        swapped = self.kv((bf16, bf16))
        for kv in (plain, self.kv((bf16, fp16)), swapped):
            geometry = geometry_of(config, kv, Config())
            sizes.add(geometry.parts[0].group.block_bytes)
            found.add(namespace_of(config, kv, geometry, Config()).digest)
        assert plain.kv_cache_groups[0].kv_cache_spec.shapes[0] == (3, 8192)
        assert swapped.kv_cache_groups[0].kv_cache_spec.shapes[0] == (8192, 3)
        assert (len(found), len(sizes)) == (3, 1)


class TestWhatLeaked:
    """A2: engines whose KV differs, and that had one digest."""

    def test_online_quantization(self, config: VllmConfig) -> None:
        from vllm.config.quantization import QuantizationConfigArgs

        found = {digest(config)}
        for arguments in (
            {"linear": "fp8_per_token"},
            {"linear": "mxfp8"},
            {"linear": "mxfp8", "ignore": ["lm_head"]},
        ):
            config.model_config.quantization_config = QuantizationConfigArgs(**arguments)
            found.add(digest(config))
        assert len(found) == 4

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model_config.model_impl", "transformers"),
            ("model_config.model_class_overrides", {"LlamaForCausalLM": "elsewhere:Llama"}),
            ("model_config.code_revision", "abc"),
            ("load_config.model_loader_extra_config", {"qlora_adapter_name_or_path": "x"}),
            ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
            ("parallel_config.data_parallel_size", 2),
            ("parallel_config.enable_expert_parallel", True),
        ],
    )
    def test_a_setting(self, config: VllmConfig, field: str, value: Any) -> None:
        before = digest(config)
        section, _, name = field.partition(".")
        object.__setattr__(getattr(config, section), name, value)
        assert digest(config) != before

    def test_which_layers_a_group_has(self, config: VllmConfig) -> None:
        """As with kv_cache_dtype_skip_layers of [0] and of [1]."""

        def kv(*names: str) -> KVCacheConfig:
            spec = FullAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32
            )
            return KVCacheConfig(
                num_blocks=8,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(list(names), spec)],
            )

        assert (
            len(
                {
                    digest(config, kv(*names))
                    for names in (("l.0", "l.1"), ("l.1", "l.0"), ("l.0", "l.2"))
                }
            )
            == 3
        )

    @pytest.mark.parametrize(
        "file",
        [
            "modeling_own.py",
            "model.tensors",
            "part/model-1.safetensors",
            "model.safetensors.index.json",
        ],
    )
    def test_files_beside_the_weights(
        self, config: VllmConfig, tmp_path: Path, file: str, notes: None
    ) -> None:
        found = set()
        for number, content in enumerate((None, "one", "two")):
            folder = make_folder(tmp_path / str(number))
            if content is not None:
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_text(content)
            config.model_config.model = str(folder)
            kv = make_kv_config(Options(folder))
            found.add(namespace_of(config, kv, geometry_of(config, kv, Config()), Config()).digest)
        assert len(found) == 3

    @pytest.mark.parametrize(
        "file",
        ["README.md", "tokenizer.json", "generation_config.json", ".gitattributes", ".cache/x"],
    )
    def test_files_that_shape_no_kv(
        self, config: VllmConfig, tmp_path: Path, file: str, notes: None
    ) -> None:
        found = set()
        for number in range(2):
            folder = make_folder(tmp_path / str(number))
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(str(number))
            config.model_config.model = str(folder)
            kv = make_kv_config(Options(folder))
            found.add(namespace_of(config, kv, geometry_of(config, kv, Config()), Config()).digest)
        assert len(found) == 1


class TestRemoteCode:
    """Code that a model takes from the hub (`auto_map`) is told by its commit."""

    @pytest.fixture
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        return tmp_path

    def snapshot(self, hub: Path, name: str, commit: str, revision: str, *files: str) -> None:
        repository = hub / f"models--{name.replace('/', '--')}"
        for file in files:
            (repository / "snapshots" / commit / file).parent.mkdir(parents=True, exist_ok=True)
            (repository / "snapshots" / commit / file).write_text("x")
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)

    def test_of_the_model_itself_at_a_revision_of_its_own(self, hub: Path) -> None:
        self.snapshot(hub, "org/model", "a" * 40, "main", "config.json", "modeling_own.py")
        self.snapshot(hub, "org/model", "b" * 40, "code", "modeling_own.py")
        assert model_identity("org/model", "main") == f"hub:org/model@{'a' * 40}"
        auto_map = {
            "AutoModelForCausalLM": "modeling_own.Model",
            "AutoTokenizer": ["modeling_own.Slow", None],
        }
        assert code_identity("org/model", auto_map, None) == []
        assert code_identity("org/model", auto_map, "code") == [f"hub:org/model@{'b' * 40}"]

    def test_of_another_repository(self, hub: Path, tmp_path: Path) -> None:
        self.snapshot(hub, "other/code", "c" * 40, "main", "modeling_other.py")
        auto_map = {"AutoModelForCausalLM": "other/code--modeling_other.Model"}
        assert code_identity(str(tmp_path), auto_map, None) == [f"hub:other/code@{'c' * 40}"]

    def test_that_cannot_be_told_is_refused(self, hub: Path) -> None:
        with pytest.raises(LayoutError, match="set model_id"):
            code_identity("org/model", {"AutoModel": "nobody/knows--modeling.Model"}, None)


class TestWeightsElsewhere:
    """Weights outside the model's folder and the usual hub cache are named, or refused."""

    @pytest.fixture
    def space(self, config: VllmConfig) -> Callable[..., Namespace]:
        kv_cache = make_kv_config(Options(Path(config.model_config.model)))

        def name(**settings: Any) -> Namespace:
            told = Config(**settings)
            return namespace_of(config, kv_cache, geometry_of(config, kv_cache, told), told)

        return name

    @pytest.mark.parametrize(
        "load",
        [
            {"load_format": "tensorizer"},
            {"model_loader_extra_config": {"tensorizer_config": {"tensorizer_uri": "s3://b/m"}}},
            {"model_loader_extra_config": {"files": ["/elsewhere/model"]}},
        ],
        ids=["tensorizer", "a URI", "a list of files"],
    )
    def test_that_the_loader_is_pointed_to_are_refused_without_a_model_id(
        self, config: VllmConfig, space: Callable[..., Namespace], load: dict[str, Any]
    ) -> None:
        for name, value in load.items():
            setattr(config.load_config, name, value)
        with pytest.raises(LayoutError, match="reads them from elsewhere; set model_id"):
            space()
        assert space(model_id="mine").model == "mine"

    def test_settings_of_a_loader_without_a_place_are_served(
        self, config: VllmConfig, space: Callable[..., Namespace]
    ) -> None:
        config.load_config.model_loader_extra_config = {"concurrency": 16, "pattern": "part-{n}"}
        assert space().digest

    def test_from_modelscope_are_refused_unless_they_are_in_a_folder(
        self,
        config: VllmConfig,
        space: Callable[..., Namespace],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
        assert space().digest
        with pytest.raises(LayoutError, match="they come from ModelScope; set model_id"):
            check_weights(config.load_config, "org/model")

    def test_in_another_hub_cache_are_named_by_the_commit_there(self, tmp_path: Path) -> None:
        place = tmp_path / "models--org--model"
        (place / "snapshots" / ("d" * 40)).mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("d" * 40)
        for revision in (None, "main", "d" * 40):
            found = model_identity("org/model", revision, cache_dir=str(tmp_path))
            assert found == f"hub:org/model@{'d' * 40}"
        for revision in ("other", "e" * 40):
            with pytest.raises(LayoutError, match="has no snapshot of its revision; set model_id"):
                model_identity("org/model", revision, cache_dir=str(tmp_path))

    def test_of_towers_with_a_repository_of_their_own_are_named_by_their_commits(
        self, config: VllmConfig, space: Callable[..., Namespace], tmp_path: Path
    ) -> None:
        """As Ultravox has them."""
        tower = tmp_path / "tower"
        tower.mkdir()
        (tower / "model.safetensors").write_bytes(b"one")
        before = space().digest
        config.model_config.hf_config.audio_model_id = str(tower)
        named = space().digest
        (tower / "model.safetensors").write_bytes(b"two")
        assert len({before, named, space().digest}) == 3
        config.model_config.hf_config.audio_model_id = "nobody/knows"
        with pytest.raises(LayoutError, match="set model_id"):
            space()


class TestTheSame:
    def test_for_two_starts_of_one_configuration(self, config: VllmConfig, tmp_path: Path) -> None:
        """Ports, ids and folders differ from start to start."""
        again = make_config(Options(make_folder(tmp_path / "elsewhere")), Path("another socket"))
        assert again.instance_id != config.instance_id
        assert digest(again) == digest(config)

    def test_for_all_processes_of_an_engine(self, tmp_path: Path) -> None:
        """Keys are the scheduler's alone: workers register the layout, whatever vLLM has changed in
        their configuration.
        """
        folder, node = make_folder(tmp_path / "model"), NodeProcess(tmp_path / "node.sock")
        connectors = []
        try:
            for rank, role in (
                (0, KVConnectorRole.SCHEDULER),
                (0, KVConnectorRole.WORKER),
                (1, KVConnectorRole.WORKER),
            ):
                options = Options(folder)
                config = make_config(options, node.socket)
                config.parallel_config.tensor_parallel_size, config.parallel_config.rank = 2, rank
                if role == KVConnectorRole.WORKER:
                    config.model_config.hf_config.made_while_loading = object()
                connectors.append(KVHoldConnector(config, role, make_kv_config(options)))
            scheduler, *workers = connectors
            with NodeClient(node.socket, ClientConfig(), name="test") as client:
                spaces, _, _ = client.names()
            assert [space.digest for space in spaces] == [scheduler.scheduler._configured.digest]
            layouts = {worker.worker._namespace.layout.fingerprint for worker in workers}
            assert layouts == {scheduler.scheduler._configured.layout.fingerprint}
        finally:
            for connector in connectors:
                connector.shutdown()
            node.kill()


class TestShare:
    def test_versions(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        before = digest(config, share=["versions", "cpu"])
        monkeypatch.setattr(vllm, "__version__", "0.32.1")
        monkeypatch.setattr(walk, "processor_facts", lambda: {"cpu.maker": "'another'"})
        assert digest(config, share=["versions", "cpu"]) == before
        assert digest(config, share=["versions"]) != before

    def test_one_fact(self, config: VllmConfig) -> None:
        settings = {"share": ["vllm.model_config.code_revision"]}
        before = digest(config, **settings)
        config.model_config.code_revision = "abc"
        assert digest(config, **settings) == before

    def test_of_nothing_is_an_error(self, config: VllmConfig) -> None:
        with pytest.raises(ConfigError, match="share: 'version' is neither"):
            digest(config, share=["version"])
