"""Copies between blocks on a device and the arena in host memory.

    copier = copier_for("cuda:0", threads=2, cache=cache)       # a `Copier` (`memory/copier.py`)

- `driver.py`: the contract of a device
- `cuda.py`, `streams.py`: drivers for NVIDIA GPUs, and for every device that has streams in torch;
  `kvhold.testing.device` has a fake driver whose streams run late
- `ring.py`: the staging memory on the device
- `pinning.py`: registers the arena with the device
- `batches.py`: divides a copy into pieces of memory
- `crossover.py`: measures which of two paths is faster
- `copier.py`: submits kernels and copies in the right order
"""

import logging

from kvhold.core.api import Cache
from kvhold.core.errors import LayoutError
from kvhold.memory.copier import Copier, HostCopier
from kvhold.memory.device.copier import DeviceCopier, Settings
from kvhold.memory.device.driver import Copies, Driver, Event, Lane
from kvhold.memory.device.pinning import PinnedArenas
from kvhold.memory.device.ring import Ring

__all__ = [
    "Copies",
    "DeviceCopier",
    "Driver",
    "Event",
    "Lane",
    "PinnedArenas",
    "Ring",
    "Settings",
    "copier_for",
    "proven_copier_for",
]

log = logging.getLogger(__name__)


def copier_for(device: str, *, threads: int, cache: Cache) -> Copier:
    """Make the copier for views of a device.

    threads: how many share the work of one copy in host memory
    cache:   the owner of the arena; its node learns of the device when the first copy is submitted

    Raises LayoutError for a device without streams, and DeviceError.
    """
    if device == "cpu":
        return HostCopier(threads)
    driver = _driver_for(device)
    log.info("kvhold: copies between %s and the arena: %s", device, type(driver).__name__)
    copier = DeviceCopier(
        driver, PinnedArenas(driver, report=cache.report_pinned), mappings=cache.map_for_device
    )
    if driver.has_direct_copies:
        copier.measure(device)
    return copier


def proven_copier_for(device: str, *, threads: int, cache: Cache, allow_unproven: bool) -> Copier:
    """Make the copier for a device that kvhold was not tested on, and check its copies.

    Arguments and errors as for `copier_for`. Also raises LayoutError if the check fails, or if
    `allow_unproven` is False.
    """
    if device == "cpu":
        return copier_for(device, threads=threads, cache=cache)
    if not allow_unproven:
        raise LayoutError(
            f"on {device} copies have not been shown to be exact (allow_unproven = true "
            "serves it if the check at start passes)"
        )
    from kvhold.memory.device.check import check_copies

    log.warning(
        "kvhold: on %s copies have not been shown to be exact; it serves because "
        "allow_unproven is set",
        device,
    )
    copier = copier_for(device, threads=threads, cache=cache)
    check_copies(copier, device)
    return copier


def _driver_for(device: str) -> Driver:
    import torch

    from kvhold.memory.device.streams import TorchDriver

    if device.startswith("cuda") and torch.version.hip is None:
        try:
            from kvhold.memory.device.cuda import CudaDriver

            return CudaDriver(torch.device(device))
        except ImportError as error:
            log.warning("kvhold: copies are slow: %s; pip install cuda-bindings", error)
    return TorchDriver(torch.device(device))
