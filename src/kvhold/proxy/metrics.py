from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from kvhold.proxy.admission import Admission
from kvhold.proxy.engines import ProxiedEngine

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PREFIX = "kvhold_proxy_"


class ProxyMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests",
            "Requests, by kind (completions, chat, messages, other) and status.",
            "kind",
            "status",
        )
        self.prefills = self._counter(
            "prefills",
            "Requests for tokens, by what became of the prefill part: done, failed, abandoned, "
            "short, hit, unsupported, no_engine.",
            "result",
        )
        self.refused = self._counter(
            "refused",
            "Requests refused by the proxy: draining, queue_full, queue_timeout, memory, "
            "too_large, bad_request, no_key, no_path, no_answer, slow_client, bug.",
            "reason",
        )
        self.retries = self._counter(
            "retries", "Attempts after a failed one, by part: prefill, decode.", "part"
        )
        self.faults = self._counter(
            "engine_faults",
            "Faults of engines: refused, disconnected, timeout, silent, status, invalid.",
            "role",
            "engine",
            "reason",
        )
        self.retains = self._counter(
            "retains",
            "Prefixes that clients want kept: asked of an engine, or unplaced, where no engine "
            "tells their length.",
            "result",
        )
        self.cut = self._counter("cut_answers", "Answers that broke off after their first byte.")
        self.clients_left = self._counter(
            "clients_left",
            "Clients that left before their answer, by stage: before, prefill, decode.",
            "stage",
        )
        self.queue_seconds = self._histogram("queue_seconds", "Time in the queue.")
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "Time of the prefill parts that were done."
        )
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds", "Time from a request's arrival to the first byte of its answer."
        )

    def watch(self, engines: Sequence[ProxiedEngine], admission: Admission) -> None:
        self.registry.register(_State(engines, admission))

    def render(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(_PREFIX + name, help, registry=self.registry, buckets=_SECONDS)


class _State:
    def __init__(self, engines: Sequence[ProxiedEngine], admission: Admission) -> None:
        self._engines = engines
        self._admission = admission

    def collect(self) -> list[GaugeMetricFamily]:
        return [
            self._by_engine(
                "engine_usable", "1: requests go to the engine.", lambda engine: engine.is_usable
            ),
            self._by_engine(
                "engine_running",
                "Requests that an engine runs for this proxy.",
                lambda engine: engine.running,
            ),
            self._by_engine(
                "engine_tokens",
                "Estimated tokens of these requests' prompts.",
                lambda engine: engine.tokens,
            ),
            GaugeMetricFamily(
                _PREFIX + "running", "Requests in progress.", value=self._admission.running
            ),
            GaugeMetricFamily(
                _PREFIX + "queued",
                "Requests that wait for a decode engine.",
                value=self._admission.queued,
            ),
            GaugeMetricFamily(
                _PREFIX + "held_bytes",
                "Memory of the bodies of requests.",
                value=self._admission.held_bytes,
            ),
        ]

    def _by_engine(
        self, name: str, help: str, value: Callable[[ProxiedEngine], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(_PREFIX + name, help, labels=("role", "engine"))
        for engine in self._engines:
            family.add_metric((engine.role, engine.name), float(value(engine)))
        return family
