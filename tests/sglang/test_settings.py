"""What a user may write into SGLang's JSON for us. Needs no SGLang."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.errors import ConfigError
from kvhold.integrations.sglang.settings import SGLangSettings, linker_settings, storage_settings
from tools.setup_env import SGLANG, sglang_folder

OF_SGLANG = {
    "backend_name": "kvhold",
    "module_path": "kvhold.integrations.sglang",
    "class_name": "KVHoldStorage",
    "interface_v1": 1,
}


def test_settings_of_kvhold_stand_in_a_section_of_the_storages_json() -> None:
    read = storage_settings(
        OF_SGLANG
        | {"kvhold": {"ram_bytes": "2GiB", "embedded": True, "kv_cache_dtype": "fp8_e5m2"}}
    )
    assert (read.config.ram_bytes, read.embedded, read.kv_dtype) == (2 << 30, True, "float8_e5m2")


def test_all_of_the_linkers_json_is_ours() -> None:
    read = linker_settings({"node": {"socket": "/run/k.sock"}, "model_id": "m"})
    assert (read.config.node.socket, read.config.model_id, read.embedded) == (
        "/run/k.sock",
        "m",
        False,
    )


@pytest.mark.parametrize("nothing", [None, {}, OF_SGLANG, {"kvhold": {}}])
def test_nothing_need_be_said(
    nothing: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOLD_MODEL_ID", "from the environment")
    read = storage_settings(nothing)
    assert read == SGLangSettings(read.config)
    assert read.config.model_id == "from the environment"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kvhold": {"ram_byte": 1}}, "kvhold: arguments: .*ram_byte.*ram_bytes"),
        ({"kvhold": {"node": {"sockets": "x"}}}, r"node\.socket"),
        ({"kvhold": {"embedded": 1}}, "kvhold.embedded = 1"),
        (
            {"kvhold": {"kv_cache_dtype": "fp8_e4m2"}},
            "kvhold.kv_cache_dtype = 'fp8_e4m2': must be one of fp8_e4m3, fp8_e5m2; did you mean",
        ),
        (
            {"kvhold": {"memory_codec": "int8"}},
            "kvhold.memory_codec = 'int8': SGLang's KV is kept as it is",
        ),
        ({"kvhold": []}, "kvhold is a section"),
        ({"ram_bytes": 1}, "'ram_bytes' is not a field here; .* section 'kvhold'"),
    ],
)
def test_what_is_not_understood_is_named(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        storage_settings(OF_SGLANG | extra)


def test_the_linkers_json_names_its_fields_too() -> None:
    with pytest.raises(ConfigError, match=r"linker_extra_config: arguments: .*model_i"):
        linker_settings({"model_i": "m"})


def test_the_package_imports_without_sglang() -> None:
    import kvhold.integrations.sglang as package

    assert package.__all__ == ["KVHoldLinker", "KVHoldStorage"]
    with pytest.raises(AttributeError, match="no attribute 'Storage'"):
        _ = package.Storage


@pytest.mark.sglang
def test_the_sglang_here_is_the_one_that_is_supported() -> None:
    folder = sglang_folder(Path(sys.prefix))
    if not folder.is_dir() and importlib.util.find_spec("sglang") is None:
        pytest.skip(
            "no SGLang in this environment: the tests with it were left out (make setup "
            f"puts it into {folder})"
        )
    import sglang

    assert sglang.__version__ == SGLANG
