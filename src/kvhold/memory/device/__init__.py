"""Copies between blocks on a device and the arena. The contract is in `driver.py`."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvhold.core.api import Cache
from kvhold.core.errors import LayoutError
from kvhold.memory.copier import Copier, HostCopier
from kvhold.memory.device.copier import Checkers, DeviceCopier, Settings
from kvhold.memory.device.driver import Copies, DeviceDriver, DeviceEvent, Lane
from kvhold.memory.device.pinning import PinnedArenas
from kvhold.memory.device.ring import Ring

__all__ = [
    "COPY_THREADS",
    "Copies",
    "DeviceCopier",
    "DeviceDriver",
    "DeviceEvent",
    "Lane",
    "PinnedArenas",
    "Ring",
    "Settings",
    "copier_for",
    "new_checkers",
    "numa_node_of",
    "proven_copier_for",
    "sum_threads",
]

COPY_THREADS = 2
_MOST_SUM_THREADS = 8  # one thread sums 6 GB/s; a bus carries 50 GB/s

log = logging.getLogger(__name__)


def copier_for(device: str, *, threads: int, cache: Cache) -> Copier:
    """threads: for copies or checksums, the caller included; 0: chosen for the device

    Raises LayoutError for a device without streams, and DeviceError.
    """
    if device == "cpu":
        return HostCopier(threads or COPY_THREADS)
    from kvhold.memory.device.check import takes_sums

    driver = _driver_for(device)
    log.info("kvhold: copies between %s and the arena: %s", device, type(driver).__name__)
    copier = DeviceCopier(
        driver,
        PinnedArenas(driver, report=partial(cache.report_pinned, numa_node=numa_node_of(device))),
        mappings=cache.map_for_device,
        threads=threads or sum_threads(),
        checkers=new_checkers(),
        sums_on=device if takes_sums(driver, device) else None,
    )
    if driver.has_direct_copies:
        copier.measure(device)
    return copier


def numa_node_of(device: str, devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """-1: unknown."""
    import torch

    if not device.startswith("cuda"):
        return -1
    found = torch.cuda.get_device_properties(torch.device(device))
    try:
        slot = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return int((devices / slot / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1


def new_checkers() -> Checkers:
    return {
        lane: ThreadPoolExecutor(1, thread_name_prefix="kvhold-check")
        for lane in (Lane.STORE, Lane.LOAD)
    }


def sum_threads() -> int:
    return min(_MOST_SUM_THREADS, max(1, (os.cpu_count() or 1) // 2))


def proven_copier_for(
    device: str, *, threads: int, cache: Cache, allow_unproven: bool, shown_on_nvidia: bool = False
) -> Copier:
    """shown_on_nvidia: the caller's copies were shown to be exact on an NVIDIA GPU

    Raises DeviceError, and LayoutError: no streams, a failed check, or an unproven device, unless
    `allow_unproven`.
    """
    if device == "cpu":
        return copier_for(device, threads=threads, cache=cache)
    is_shown = shown_on_nvidia and _is_nvidia(device)
    if not is_shown and not allow_unproven:
        raise LayoutError(
            f"on {device} copies have not been shown to be exact (allow_unproven = true "
            "serves it if the check at start passes)"
        )
    from kvhold.memory.device.check import check_copies

    if not is_shown:
        log.warning(
            "kvhold: on %s copies have not been shown to be exact; it serves because "
            "allow_unproven is set",
            device,
        )
    copier = copier_for(device, threads=threads, cache=cache)
    check_copies(copier, device)
    return copier


def _is_nvidia(device: str) -> bool:
    import torch

    return device.startswith("cuda") and torch.version.hip is None


def _driver_for(device: str) -> DeviceDriver:
    import torch

    from kvhold.memory.device.streams import TorchDriver

    if _is_nvidia(device):
        try:
            from kvhold.memory.device.cuda import CudaDriver

            return CudaDriver(torch.device(device))
        except ImportError as error:
            log.warning("kvhold: copies are slow: %s; pip install cuda-bindings", error)
    return TorchDriver(torch.device(device))
