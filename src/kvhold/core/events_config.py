from dataclasses import dataclass

from kvhold.core.setting import setting, size


@dataclass(frozen=True)
class EventsConfig:
    """KV cache events in vLLM's format, over ZMQ (`kvhold[events]`)."""

    publish: str = setting(
        "",
        "where the node publishes KV cache events for routers, such as tcp://127.0.0.1:5567 or "
        "ipc:///run/kvhold/events; empty: nowhere. They hold the token ids of prompts, and ZMQ has "
        "no login: beyond loopback, events.insecure is needed",
    )
    replay: str = setting(
        "",
        "where routers ask for batches that they missed, such as tcp://127.0.0.1:5568; empty: "
        "nowhere",
    )
    topic: str = setting(
        "", "topic of the events; llm-d reads kv@POD@MODEL, such as kv@10.0.0.7@my-model"
    )
    insecure: bool = setting(
        False,
        "publish beyond loopback, to everyone who reaches the port, in clear text",
    )
    replay_bytes: int = size(64 << 20, "most bytes of the latest batches, kept for replays")
    description_bytes: int = size(
        128 << 20,
        "most memory for the token ids and block hashes of chunks; the chunks whose description "
        "is the oldest are announced as removed",
    )
