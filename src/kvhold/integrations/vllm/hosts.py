"""An engine whose workers are on several hosts is refused: each worker would join the node of its
own host.

The scheduler's tickets mean nothing to another node. All its hits would be lost, and nobody would
say so. vLLM's settings tell some such engines (`geometry.py`); where they do not (Ray places
workers as it likes), the workers tell the scheduler where their node is.
"""

from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvhold.core.errors import LayoutError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodePlace(KVConnectorHandshakeMetadata):
    """Where a process finds its node.

    boot:    of the host, since it was started
    folder:  of the node's socket: device and inode, which differ between containers that do not
        share it
    """

    boot: str
    folder: tuple[int, int]
    socket: str  # for people


def place_of(socket: Path) -> NodePlace:
    """Where this process finds the node that listens on `socket`."""
    status = socket.parent.stat()
    return NodePlace(_BOOT.read_text().strip(), (status.st_dev, status.st_ino), str(socket))


def check_places(scheduler: NodePlace, workers: dict[tuple[int, int], NodePlace]) -> None:
    """Raise LayoutError unless all workers use the scheduler's node. workers: by pipeline stage and
    tensor parallel rank.
    """
    for (stage, rank), place in sorted(workers.items()):
        if place.boot != scheduler.boot:
            where = "is on another host than the scheduler"
        elif place.folder != scheduler.folder:
            where = (
                f"finds its node in another folder ({place.socket}) than the scheduler "
                f"({scheduler.socket})"
            )
        else:
            continue
        raise LayoutError(
            "kvhold does not serve an engine whose workers use several nodes: worker "
            f"{rank} of stage {stage} {where}. "
            f"Run the engine's workers on one host, and let them share the folder of node.socket"
        )
