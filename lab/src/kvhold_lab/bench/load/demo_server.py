"""vLLM with kvhold and a small model."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvhold.core.errors import ConfigError
from kvhold.node import end_node
from kvhold_lab.engines.engine import is_vllm_available, kvhold_connector, options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer

_NODE_OUTLIVES_ENGINE_S = 120.0
_SOCKET = "node.sock"


@contextmanager
def demo_server(
    size: str,
    *,
    context_tokens: int,
    ram_bytes: int,
    disk_bytes: int = 0,
    policy: str = "lru",
    prefix_caching: bool = True,
) -> Iterator[OpenAIServer]:
    """context_tokens: the longest prompt with its output
    disk_bytes:     of a disk tier; 0: none
    policy:         of memory and disk

    Raises ConfigError without vLLM, EngineFailed.
    """
    if not is_vllm_available():
        raise ConfigError(
            "--serve-demo needs vLLM, which is not installed here; name a server with --base-url"
        )
    model = make_model(size)
    with tempfile.TemporaryDirectory(prefix="kvhold-load-", ignore_cleanup_errors=True) as folder:
        connector = connector_of(
            Path(folder), ram_bytes=ram_bytes, disk_bytes=disk_bytes, policy=policy
        )
        options = options_for(
            model,
            max_model_len=context_tokens,
            kv_cache_bytes=context_tokens * model.kv_bytes_per_token
            + _spare_bytes(model.kv_bytes_per_token),
            kv_transfer_config=connector,
            prefix_caching=prefix_caching,
            own_binding=True,
        )
        try:
            with OpenAIServer(options) as server:
                yield server
        finally:
            end_node(Path(folder) / _SOCKET)


def connector_of(
    folder: Path, *, ram_bytes: int, disk_bytes: int = 0, policy: str = "lru"
) -> dict[str, Any]:
    disk = f"disk://{folder}/disk?max_bytes={disk_bytes}&policy={policy}"
    return kvhold_connector(
        folder / _SOCKET,
        ram_bytes,
        idle_exit_s=_NODE_OUTLIVES_ENGINE_S,
        policy=policy,
        tiers=[disk] if disk_bytes else [],
    )


def _spare_bytes(kv_bytes_per_token: int) -> int:
    return 4 * 128 * kv_bytes_per_token
