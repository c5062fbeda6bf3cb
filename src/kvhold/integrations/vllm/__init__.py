"""kvhold inside vLLM: `--kv-transfer-config '{"kv_connector": "KVHoldConnector", "kv_role":
"kv_both"}'`.

vLLM finds the name through the plugin entry point (`register`), or without it by
`"kv_connector_module_path": "kvhold.integrations.vllm"`. `connector.py` is the class that vLLM
dictates; it only forwards: to `scheduler.py` in the scheduler's process, to `worker.py` in each
worker's. `tracker.py` follows one request, `space.py` says what names and shapes this engine's KV
has, `steps.py` is what the
scheduler tells the workers. Supported: vLLM 0.32.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhold.integrations.vllm.connector import KVHoldConnector

__all__ = ["KVHoldConnector", "register"]

_NAME = "KVHoldConnector"


def register() -> None:
    """Make the connector known to vLLM by name. vLLM calls this in each of its processes, sometimes
    more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvhold.integrations.vllm.connector", _NAME)


def __getattr__(name: str) -> Any:
    if name == _NAME:
        from kvhold.integrations.vllm.connector import KVHoldConnector

        return KVHoldConnector
    raise AttributeError(f"module 'kvhold.integrations.vllm' has no attribute {name!r}")
