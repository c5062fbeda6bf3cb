from kvhold.core.config import load_config
from kvhold.node import NodeClient
from kvhold.node.paths import socket_path


def connect(socket: str | None, name: str) -> NodeClient:
    config = load_config({"node": {"socket": socket}} if socket else {})
    return NodeClient(socket_path(config.node.socket), config.client, name=name)
