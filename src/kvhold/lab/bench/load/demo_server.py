"""A server to try the workloads on: vLLM with kvhold's connector and a model that is made here, on
this host.

    with demo_server("tiny", context_tokens=8_192, ram_bytes=1 << 30) as server:
        server.base_url

The engine's own memory holds one prompt of the longest length, so what a workload meets again comes
out of kvhold unless it is small.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvhold.core.errors import ConfigError
from kvhold.lab.engines.engine import is_vllm_available, options_for
from kvhold.lab.engines.models import make_model
from kvhold.lab.engines.openai_server import OpenAIServer
from kvhold.node import end_node

_NODE_OUTLIVES_ENGINE_S = 120.0


@contextmanager
def demo_server(size: str, *, context_tokens: int, ram_bytes: int) -> Iterator[OpenAIServer]:
    """Started and healthy; it and its node end with the block.

    size: of the model (tiny, small, mid); context_tokens: the longest prompt with its output;
        ram_bytes: kvhold's

    Raises ConfigError where there is no vLLM, EngineFailed if it does not start.
    """
    if not is_vllm_available():
        raise ConfigError(
            "--serve-demo needs vLLM, which is not installed here; name a server with --base-url"
        )
    model = make_model(size)
    with tempfile.TemporaryDirectory(prefix="kvhold-load-") as folder:
        socket = Path(folder) / "node.sock"
        connector = {
            "kv_connector": "KVHoldConnector",
            "kv_connector_module_path": "kvhold.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "ram_bytes": ram_bytes,
                "node": {"socket": str(socket), "idle_exit_s": _NODE_OUTLIVES_ENGINE_S},
            },
        }
        options = options_for(
            model,
            max_model_len=context_tokens,
            kv_cache_bytes=context_tokens * model.kv_bytes_per_token
            + _spare_bytes(model.kv_bytes_per_token),
            kv_transfer_config=connector,
            own_binding=True,
        )
        try:
            with OpenAIServer(options) as server:
                yield server
        finally:
            end_node(socket)


def _spare_bytes(kv_bytes_per_token: int) -> int:
    """Of a few blocks: vLLM keeps one for itself, and the longest prompt's last is not full."""
    return 4 * 128 * kv_bytes_per_token
