"""The path of the API's Unix socket."""

from pathlib import Path

from kvhold.core.control_config import ControlConfig


def control_path(config: ControlConfig, node_path: Path) -> Path:
    """node_path: of the node's socket"""
    if not config.socket:
        return node_path.with_name("control.sock")
    return Path(config.socket).expanduser().absolute()
