import logging

from kvhold.blend.canary import Drift
from kvhold.blend.spans import Span
from kvhold.core.api import Cache, Hit
from kvhold.core.errors import KVHoldError
from kvhold.core.planning import BlendReport, SpanReport

log = logging.getLogger(__name__)


def report(cache: Cache, blend: BlendReport) -> None:
    """Does not raise KVHoldError."""
    try:
        cache.report_blend(blend)
    except KVHoldError as error:
        log.debug("kvhold: the blend of %s is not reported: %s", blend.request, error)


def span_report(span: Span, hit: Hit, *, is_alone: bool) -> SpanReport:
    missing = str(hit.reason) if is_alone and hit.reason is not None else ""
    return SpanReport(span.start, span.end, dict(hit.sources), list(hit.loaded), missing, is_alone)


def drift_note(drift: Drift) -> str:
    likeliest = "the same" if drift.agrees else "another"
    return f"KL {drift.kl:.2g} nats, {likeliest} token is likeliest"
