"""kvhold in vLLM.

    --kv-transfer-config '{"kv_connector": "KVHoldConnector", "kv_role": "kv_both"}'

vLLM finds the connector by the plugin entry point (`register`), or by `"kv_connector_module_path":
"kvhold.integrations.vllm"`. Supported: vLLM 0.30 to 0.32.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhold.integrations.vllm.connector import KVHoldConnector

__all__ = ["KVHoldConnector", "register"]

_NAME = "KVHoldConnector"


def register() -> None:
    """vLLM may call this repeatedly."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvhold.integrations.vllm.connector", _NAME)


def __getattr__(name: str) -> Any:
    if name == _NAME:
        from kvhold.integrations.vllm.connector import KVHoldConnector

        return KVHoldConnector
    raise AttributeError(f"module 'kvhold.integrations.vllm' has no attribute {name!r}")
