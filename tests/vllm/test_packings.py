"""The packings that codecs undo are those that vLLM's own kernels write."""

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch
import vllm
from vllm import _custom_ops as ops

from kvhold.codecs.packings import is_known, to_canonical
from kvhold.core.layout import Group

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("isa", "block", "head_dim"),
    [("vec", 32, 64), ("vec", 128, 128), ("vec16", 16, 64), ("vec16", 48, 80)],
)
def test_what_the_kernel_writes_is_put_in_the_canonical_order(
    isa: str, block: int, head_dim: int, dtype: torch.dtype
) -> None:
    version = ".".join(vllm.__version__.split(".")[:2])
    group = Group(
        layers=1,
        planes=2,
        heads=3,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        packing=f"vllm-{version}-cpu_attn-{isa}",
        block_tokens=block,
        block_bytes=2 * 3 * block * head_dim * dtype.itemsize,
    )
    assert is_known(group)
    cache = torch.zeros(4, 3, block, 2 * head_dim, dtype=dtype)
    keys, values = cache.view(4, 3, 2 * block, head_dim).chunk(2, dim=2)
    k, v = (torch.randn(2 * block, 3, head_dim).to(dtype) for _ in "kv")
    # the first tokens in block 2, the others in block 0
    slots = torch.cat([torch.arange(block) + 2 * block, torch.arange(block)])
    ops.cpu_attn_reshape_and_cache(
        k, v, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    layer = torch.stack([cache[2], cache[0]]).reshape(-1).view(torch.uint8).numpy()
    plain = torch.from_numpy(
        np.frombuffer(to_canonical(memoryview(layer.data), group), np.uint8).copy()
    ).view(dtype)
    assert torch.equal(plain.view(2, 2 * block, 3, head_dim), torch.stack([k, v]))
