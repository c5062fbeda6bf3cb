import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvhold.core.errors import LayoutError
from kvhold.core.holdings import ChunkBytes
from kvhold.core.layout import Group
from kvhold.kernels import Ranges, RunningSums, begin_sums
from kvhold.kernels.reference_sums import sum_ranges
from kvhold.memory.copier import Copier, Piece, Stage
from kvhold.memory.device.driver import DeviceDriver, Lane
from kvhold.memory.selftest import check_orders
from kvhold.memory.views import opaque_blocks

_LAYERS, _BLOCKS, _BLOCK_BYTES = 4, 6, 64 << 10
_SUMMED_BYTES = 128 << 10

log = logging.getLogger(__name__)


def check_copies(copier: Copier, device: str) -> None:
    """Random blocks, and the order. Raises LayoutError or DeviceError."""
    group = Group(
        layers=_LAYERS,
        planes=1,
        heads=1,
        head_dim=_BLOCK_BYTES,
        dtype="uint8",
        packing="check",
        block_tokens=1,
        block_bytes=_BLOCK_BYTES,
    )
    tensors = [
        torch.zeros(_BLOCKS, _BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(_LAYERS)
    ]
    blocks, chunk_bytes = np.arange(0, _BLOCKS, 2, dtype=np.int64), _LAYERS * _BLOCK_BYTES
    places = ChunkBytes(np.arange(blocks.size) * chunk_bytes, np.ones(blocks.size, np.int64))
    with copier.scratch(blocks.size * chunk_bytes) as buffer:
        piece = Piece(opaque_blocks(group, tensors, block_axis=0), blocks, buffer, places)
        known = TensorBlocks(tensors, [int(block) for block in blocks], buffer.size)
        for stage in copier.stages():
            known.write(stage, 1)
            copier.gather([piece], after=copier.mark()).wait()
            if not np.array_equal(buffer, known.bytes_of(1)):
                raise LayoutError(
                    f"copies on {device} are not exact: gathered bytes are not those of the blocks"
                )
        check_orders(copier, piece, known)
    if any(tensor[1::2].any() for tensor in tensors):
        raise LayoutError(
            f"copies on {device} are not exact: blocks that were not copied have changed"
        )


def takes_sums(driver: DeviceDriver, device: str) -> bool:
    """The device's kernel gives the host's checksums."""
    if not device.startswith("cuda"):
        return False
    try:
        agree = sums_agree(driver, device)
    except Exception as error:  # noqa: BLE001
        log.warning("kvhold: %s takes no checksums, the host does: %s", device, error)
        return False
    if not agree:
        log.warning("kvhold: %s takes wrong checksums; the host takes them", device)
    return agree


def sums_agree(driver: DeviceDriver, device: str) -> bool:
    random = torch.Generator().manual_seed(3)
    of_host = torch.randint(0, 256, (_SUMMED_BYTES,), generator=random, dtype=torch.uint8)
    of_device = of_host.to(device)
    # whole blocks of XXH3, parts of a block, and ranges in pieces
    nbytes = np.array([256, 1024, 1032, 4096, 9000, 3 << 10, 2048, 1024, 376, 65536], np.int64)
    starts = np.cumsum(nbytes) - nbytes
    first = np.array([0, 1, 2, 3, 4, 5, 9, 10], np.int64)
    running: list[RunningSums] = []
    ranges = Ranges(first, of_device.data_ptr() + starts, nbytes)
    driver.launch(
        Lane.SUM, [driver.record()], lambda: running.append(begin_sums(ranges, device))
    ).wait()
    expected = sum_ranges(Ranges(first, of_host.data_ptr() + starts, nbytes))
    return bool(np.array_equal(running[0].read(), expected))


class TensorBlocks:
    def __init__(self, tensors: Sequence[torch.Tensor], blocks: Sequence[int], nbytes: int) -> None:
        self._tensors, self._blocks = tensors, list(blocks)
        random = torch.Generator().manual_seed(2)
        of_host = [
            torch.randint(0, 256, (nbytes,), generator=random, dtype=torch.uint8) for _ in range(5)
        ]
        self._on_host = [version.numpy() for version in of_host]
        self._versions = [version.to(tensors[0].device) for version in of_host]

    def write(self, stage: Stage, version: int) -> None:
        def kernel() -> None:
            rest = self._versions[version]
            for block in self._blocks:
                for tensor in self._tensors:
                    place = bytes_of_block(tensor[block])
                    place.copy_(rest[: place.numel()].view(place.shape))
                    rest = rest[place.numel() :]

        stage.compute(kernel)

    def read(self, stage: Stage) -> Callable[[], npt.NDArray[np.uint8]]:
        seen: list[torch.Tensor] = []
        stage.compute(lambda: seen.append(all_bytes(self._tensors, self._blocks)))
        return lambda: seen[0].cpu().numpy()

    def bytes_of(self, version: int) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._on_host[version]
        return found


def all_bytes(tensors: Sequence[torch.Tensor], blocks: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [bytes_of_block(tensor[block]).reshape(-1) for block in blocks for tensor in tensors]
    )


def bytes_of_block(block: torch.Tensor) -> torch.Tensor:
    order = sorted(range(block.ndim), key=lambda axis: -block.stride(axis))
    return block.permute(order).view(torch.uint8)
