"""The drivers over torch.

Torch has streams for the CPU, too, which run at once: the same code, without lateness.
"""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from kvhold.core.api import Cache
from kvhold.core.errors import DeviceError, DeviceRefused
from kvhold.core.holdings import ChunkBytes
from kvhold.memory.copier import HostCopier, Piece
from kvhold.memory.device import (
    DeviceCopier,
    PinnedArenas,
    Settings,
    copier_for,
    numa_node_of,
)
from kvhold.memory.device.streams import TorchDriver, device_errors
from tests.kernels.engines import make


def copier() -> DeviceCopier:
    driver = TorchDriver(torch.device("cpu"))
    # Rings are torch's tensors; the kernels of the CPU want numpy's arrays over the same memory.
    new_ring = driver.new_ring
    driver.new_ring = lambda nbytes: new_ring(nbytes).numpy()  # type: ignore[method-assign]
    return DeviceCopier(driver, PinnedArenas(driver), Settings(1 << 16, 1 << 14, 1 << 12, 1))


def test_chunks_go_through_the_ring_and_come_back() -> None:
    ours, engine = copier(), make("HND", layers=3)
    tokens = 2 * engine.view.tokens_per_block
    places = ChunkBytes(np.array([5, 9000]), np.array([tokens, tokens]))
    expected, buffer = np.zeros(1 << 15, np.uint8), np.zeros(1 << 15, np.uint8)
    piece = Piece(engine.view, np.array([1, 2, 3, 4]), buffer, places)
    HostCopier().gather([replace(piece, buffer=expected)], after=None)
    transfer = ours.gather([piece], after=ours.mark())
    ours.fence([transfer])
    assert transfer.wait() == [None]
    assert (buffer == expected).all()
    other = make("NHD", layers=3, seed=1)
    assert ours.scatter(
        [Piece(other.view, np.array([6, 0, 1, 2]), buffer, places)], after=ours.mark()
    ).wait() == [None]
    again = np.zeros_like(buffer)
    HostCopier().gather([Piece(other.view, np.array([6, 0, 1, 2]), again, places)], after=None)
    assert (again == expected).all()


def test_host_memory_is_not_pinned_and_copies_reach_the_rings_alone() -> None:
    driver = TorchDriver(torch.device("cpu"))
    with pytest.raises(DeviceRefused, match="does not know how to register"):
        driver.pin(0, 4096)
    assert not driver.has_direct_copies


def test_errors_of_torch_are_errors_of_the_device() -> None:
    with (
        pytest.raises(DeviceError, match=r"^CUDA error: an illegal memory access$"),
        device_errors(),
    ):
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")


def test_host_memory_has_the_host_s_copier() -> None:
    cache = cast("Cache", None)  # it is not needed
    assert isinstance(copier_for("cpu", threads=1, cache=cache), HostCopier)


def test_the_host_s_copier_takes_no_blocks_of_a_device() -> None:
    engine = make("NHD")
    view, places = (
        replace(engine.view, device="cuda:0"),
        ChunkBytes(np.zeros(1, np.int64), np.full(1, 8)),
    )
    piece = Piece(view, np.array([0, 1]), np.zeros(1 << 16, np.uint8), places)
    for copy in (HostCopier().gather, HostCopier().scatter):
        with pytest.raises(ValueError, match="blocks on cuda:0 need a copier of that device"):
            copy([piece], after=None)


def test_the_numa_node_of_a_gpu_is_that_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = tmp_path / "0001:3b:00.0"
    slot.mkdir()
    (slot / "numa_node").write_text("1\n")
    found = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert numa_node_of("cuda:0", tmp_path) == 1
    found.pci_bus_id = 0x3C
    assert numa_node_of("cuda:0", tmp_path) == -1, "there is no such slot"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert numa_node_of("cuda:0", tmp_path) == -1, "an older torch does not tell"
    assert numa_node_of("cpu", tmp_path) == -1


def test_the_calls_of_the_cuda_driver_are_those_of_the_library() -> None:
    """Where there is no GPU: names, arguments and constants. What they do was not run here."""
    cuda = pytest.importorskip(
        "cuda.bindings.driver", reason="no cuda-bindings in this environment"
    )
    from kvhold.memory.device import cuda as ours

    names = set(re.findall(r"(?<!torch\.)\bcuda\.(cu\w+|CU\w+)", inspect.getsource(ours)))
    assert {"cuMemHostRegister", "cuMemcpyAsync", "cuGetProcAddress"} <= names
    assert all(hasattr(cuda, name) for name in names), names
    arguments = cuda.cuMemcpyBatchAsync.__doc__.split(")")[0]
    order = [
        arguments.index(name)
        for name in ("dsts", "srcs", "sizes", "count", "attrs", "attrsIdxs", "numAttrs", "hStream")
    ]
    assert order == sorted(order)
