from dataclasses import dataclass

from kvhold.core.setting import setting


@dataclass(frozen=True)
class OtelConfig:
    """Spans from engines and nodes, and metrics from `kvhold control`."""

    endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector, for OTLP over HTTP, such as http://127.0.0.1:4318; "
        "empty: nothing is sent",
    )
    headers: tuple[str, ...] = setting(
        (),
        "HTTP headers for the collector: a table of NAME = VALUE, or NAME=VALUE with spaces "
        "between; %20 is a space in a value",
        secret=True,
        pairs=True,
    )
    ca_file: str = setting(
        "", "PEM file of the authorities to trust for the collector; empty: the usual ones"
    )
    insecure: bool = setting(
        False, "send otel.headers to another host without TLS: others on the network can read them"
    )
    traces: bool = setting(True, "send spans")
    sample_ratio: float = setting(
        1.0,
        "part of the requests to trace, of those without a trace of their own. The others are "
        "sampled as their trace is",
        minimum=0,
        maximum=1,
    )
    metrics_interval_s: float = setting(
        60.0, "seconds between two exports of the metrics by `kvhold control`; 0: none", minimum=0
    )
    max_waiting_spans: int = setting(
        2048, "most spans of a process that wait to be sent; more are dropped", minimum=1
    )
    send_interval_s: float = setting(
        5.0, "how long a span waits to be sent with others", minimum=0.01
    )
    timeout_s: float = setting(
        10.0, "how long one export takes at most, with its repetitions", minimum=0.1
    )
