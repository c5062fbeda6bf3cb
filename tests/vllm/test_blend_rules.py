"""Which engines are refused for blend, and how a request gets names that no other one has."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvhold.core.config import load_config
from kvhold.core.errors import LayoutError
from kvhold.integrations.vllm.blending.blocks import BlockElements, write_blocks
from kvhold.integrations.vllm.blending.refusals import blend_refusal
from kvhold.integrations.vllm.blending.salt import make_private
from kvhold.integrations.vllm.geometry import geometry_of
from tests.vllm.scheduling import Options, make_config, make_folder

pytestmark = pytest.mark.vllm

BLOCK = 16
SPEC: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": torch.float32,
}


def refusal(folder: Path, *, spec: Any = None, change: Any = None, **settings: Any) -> str:
    model = make_folder(folder / "model", **settings.pop("model", {}))
    config = make_config(Options(model), Path("unused"))
    group = KVCacheGroupSpec(["layers.0", "layers.1"], spec or FullAttentionSpec(**SPEC))
    kv = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    loaded = load_config(settings, environ={})
    geometry = geometry_of(config, kv, loaded)
    if change is not None:
        change(config)
    return blend_refusal(config, geometry, loaded)


def several_workers(config: VllmConfig) -> None:
    config.parallel_config.world_size = 2


def adapters(config: VllmConfig) -> None:
    config.lora_config = object()


def test_a_llama_is_not_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == ""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"change": several_workers}, "the engine has several workers"),
        ({"change": adapters}, "the engine has adapters"),
        ({"layerwise": True}, "layerwise is set"),
        ({"spec": SlidingWindowSpec(**SPEC, sliding_window=40)}, "sliding attention"),
        (
            {"model": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
            "depends on the prompt's length",
        ),
    ],
)
def test_names_the_reason(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    assert reason in refusal(tmp_path, **given)


def request(tokens: list[int], hasher: Any, salt: str | None = None) -> Request:
    return Request(
        "one",
        tokens,
        SamplingParams(max_tokens=100),
        None,
        block_hasher=hasher,
        cache_salt=salt,
    )


@pytest.fixture
def hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


TOKENS = list(range(5 * BLOCK + 3))


def test_a_private_request_shares_no_block_s_name(hasher: Any) -> None:
    exact, *private = [request(TOKENS, hasher, "user") for _ in range(3)]
    assert [make_private(one) for one in private] == ["", ""]
    for one in (exact, *private):
        one.append_output_token_ids(list(range(40)))
    names = [one.block_hashes for one in (exact, *private)]
    assert [len(of_one) for of_one in names] == [7, 7, 7]
    assert len({name for of_one in names for name in of_one}) == 21


def test_a_prompt_without_a_whole_block_stays_as_it_was(hasher: Any) -> None:
    one = request(TOKENS[: BLOCK - 1], hasher, "user")
    assert make_private(one) == "its prompt is shorter than a block"
    assert one.cache_salt == "user"


def test_names_that_ignore_the_salt_are_refused(hasher: Any) -> None:
    def unsalted(of: Request) -> Any:
        salt, of.cache_salt = of.cache_salt, None
        try:
            return hasher(of)
        finally:
            of.cache_salt = salt

    one = request(TOKENS, unsalted, "user")
    before = list(one.block_hashes)
    assert make_private(one) == "this vLLM does not name blocks by cache_salt"
    assert (one.cache_salt, one.block_hashes) == ("user", before)


class _Attention:
    """Keeps keys by column, as some of vLLM's kernels do."""

    num_kv_heads, head_size = 2, 8

    def __init__(self, lost: int = 0) -> None:
        self.impl, self._lost = self, lost

    def do_kv_cache_update(self, _: Any, keys: Any, values: Any, blocks: Any, slots: Any) -> None:
        size = blocks.shape[2] // 2
        for token, slot in enumerate(slots.tolist()):
            block, row = divmod(slot, size)
            columns = blocks[block, :, :size].flatten(1).view(2, 8, size)
            columns[:, :, row] = keys[token]
            blocks[block, :, size + row] = values[token]
        if self._lost:
            blocks.view(-1)[: self._lost] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [4, 12, 9])
def test_elements_are_read_where_the_kernel_writes_them(
    dtype: torch.dtype, num_tokens: int
) -> None:
    attention = _Attention()
    elements = BlockElements(attention, torch.zeros(1, 2, 8, 8, dtype=dtype), 4)
    blocks = torch.zeros(3, 2, 8, 8, dtype=dtype)
    keys, values = torch.randn(2, 12, 2, 8).to(dtype)
    write_blocks(attention, keys, values, blocks, torch.arange(12))
    for plane, expected in enumerate((keys, values)):
        found = torch.empty(2, num_tokens, 8, dtype=dtype)
        elements.read(blocks, found, plane)
        assert torch.equal(found, expected[:num_tokens].transpose(0, 1))


def test_blocks_whose_elements_cannot_be_read_are_refused() -> None:
    with pytest.raises(LayoutError, match="cannot be read"):
        BlockElements(_Attention(lost=2), torch.zeros(1, 2, 8, 8), 4)
