"""Refuse an engine whose workers are on several hosts.

A ticket is unknown to another host's node, so all hits would be lost silently. If the settings do
not show the hosts (Ray), each worker reports its node.
"""

from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvhold.core.errors import LayoutError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodePlace(KVConnectorHandshakeMetadata):
    """boot: id of the host's last start
    folder: device and inode of the socket's folder, to tell containers apart
    """

    boot: str
    folder: tuple[int, int]
    socket: str


def place_of(socket: Path) -> NodePlace:
    status = socket.parent.stat()
    return NodePlace(_BOOT.read_text().strip(), (status.st_dev, status.st_ino), str(socket))


def check_places(scheduler: NodePlace, workers: dict[tuple[int, int], NodePlace]) -> None:
    """Raise LayoutError unless all workers use the scheduler's node.

    workers: by (stage, rank)
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
