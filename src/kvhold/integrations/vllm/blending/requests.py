"""Requests that are blended, in the scheduler's process.

A request first gets a private salt. vLLM then looks it up again, finds nothing of its own, and
loads all tokens but the last.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhold.blend.permits import BlendRefusal, Permit, Permits, permit_model, permit_options
from kvhold.blend.reports import report, span_report
from kvhold.blend.selection import selector_of, selector_text
from kvhold.blend.spans import Span, of_ranges, span_prompt, split
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError
from kvhold.core.held_spans import HeldSpans
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.planning import MOST_NAME, MOST_NOTE, BlendReport, SpanReport
from kvhold.core.rules import RequestRules
from kvhold.integrations.vllm.blending.salt import make_private
from kvhold.integrations.vllm.handovers import WHOLE_REQUEST, HandoverPart
from kvhold.integrations.vllm.steps import BlendLoad, SpanLoad
from kvhold.node import NodeClient

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvhold.integrations.vllm.request_state import RequestState

log = logging.getLogger(__name__)

_MOST_CAUSES = 100


@dataclass
class BlendRequest:
    """is_private: it has its salt, and is not exact
    is_over:    no blend, or no further one
    """

    spans: tuple[Span, ...]
    stores: bool
    lookup: "Future[_Answer | None] | None" = None
    answer: "_Answer | None" = None
    asked_s: float = 0.0
    is_private: bool = False
    is_over: bool = False


@dataclass
class _Answer:
    """parts: spans of whole blocks, as prompts, and the ends of their texts"""

    prompt: Prompt
    parts: list[tuple[Span, Prompt, int]]
    permit: Permit
    held: HeldSpans
    loads: tuple[SpanLoad, ...] = ()
    reports: tuple[SpanReport, ...] = ()


class BlendRequests:
    def __init__(
        self,
        config: Config,
        namespace: Callable[[], Namespace],
        cache: NodeClient,
        thread: ThreadPoolExecutor,
        *,
        loads: bool,
    ) -> None:
        """namespace: of requests without a salt, as it is now. Raises ConfigError."""
        self._config = config
        self._namespace = namespace
        self._cache = cache
        self._thread = thread
        self._selector = selector_of(config.blend)
        self._selector_text = selector_text(self._selector)[:MOST_NAME] if self._selector else ""
        self._permits = Permits.of(config.blend)
        self._refusal = "" if loads else "this engine loads nothing (kv_role)"
        self._causes: set[str] = set()
        self.loads: list[BlendLoad] = []

    @property
    def is_on(self) -> bool:
        return self._selector is not None

    def refuse(self, reason: str) -> None:
        """No request is blended."""
        self._refusal = self._refusal or reason

    def arrived(
        self, request: "Request", rules: RequestRules, part: HandoverPart, *, stores: bool
    ) -> BlendRequest | None:
        """None: it has no spans, or is served without blend."""
        try:
            spans = self._spans_of(request)
        except ValueError as error:
            self._refuse(request, f"kvhold.{error}")
            return None
        if not spans:
            return None
        if reason := self._reason_against(request, rules, part):
            self._refuse(request, reason)
            return None
        return BlendRequest(spans, stores and rules.store)

    def matched(
        self, state: "RequestState", request: "Request", computed_tokens: int
    ) -> tuple[int | None, bool] | None:
        """As the connector's call, once the hit is known. None: it is served without blend."""
        blend = state.blend
        if blend is None or blend.is_over:
            return None
        found = self._matched(state, blend, request, computed_tokens)
        if found is None:
            self.let_go(state)
        return found

    def _matched(
        self,
        state: "RequestState",
        blend: BlendRequest,
        request: "Request",
        computed_tokens: int,
    ) -> tuple[int | None, bool] | None:
        if request.num_preemptions and not blend.is_private:
            return None
        most = request.num_tokens - 1
        exact = state.hit.num_tokens if state.hit is not None else 0
        if blend.lookup is None and blend.answer is None:
            if (
                all(span.end <= max(exact, computed_tokens) for span in blend.spans)
                or state.naming is None
            ):
                return None
            blend.asked_s = time.monotonic()
            blend.lookup = self._thread.submit(
                self._look_up, request, state.naming, blend.spans, state.patience_s
            )
        if blend.lookup is not None:
            if not self._has_answer(blend):
                return None, False
            if blend.answer is None:
                return None
        assert blend.answer is not None
        if not blend.is_private:
            self._plan(blend.answer, min(exact, most), most, stores=blend.stores)
            if not blend.answer.loads:
                return None
            if reason := make_private(request):
                self._refuse(request, reason)
                return None
            blend.is_private = True
            return None, False  # vLLM looks it up under its new names
        if computed_tokens:
            self._refuse(request, "vLLM finds blocks of a private salt")
            return None
        return most, True

    def allocated(self, state: "RequestState", request: "Request", block_ids: list[int]) -> None:
        """Plan the load into the request's blocks."""
        blend = state.blend
        assert blend is not None and blend.answer is not None
        exact = state.hit.num_tokens if state.hit is not None else 0
        most = request.num_tokens - 1
        self.loads.append(
            BlendLoad(
                request.request_id,
                list(request.all_token_ids),
                most,
                block_ids,
                blend.answer.loads,
                num_exact=min(exact, most),
                ticket=state.hit.ticket if state.hit is not None else 0,
                patience_s=state.patience_s,
                store_options=state.rules.store_options,
                permit=blend.answer.permit,
                reports=blend.answer.reports,
            )
        )
        blend.is_over = True

    def take(self) -> list[BlendLoad]:
        loads, self.loads = self.loads, []
        return loads

    def let_go(self, state: "RequestState") -> None:
        blend = state.blend
        if blend is None:
            return
        if blend.lookup is not None and not blend.lookup.cancel():
            self._thread.submit(_close_late, blend.lookup)
        if blend.answer is not None:
            self._thread.submit(blend.answer.held.close)
        blend.lookup = blend.answer = None
        blend.is_over = True

    def _spans_of(self, request: "Request") -> tuple[Span, ...]:
        """Raises ValueError that names the field."""
        asked = (request.kv_transfer_params or {}).get("kvhold")
        marks = asked.get("spans") if isinstance(asked, Mapping) else None
        if marks is not None:
            return of_ranges(marks, request.num_prompt_tokens)
        separator = self._config.blend.separator
        if not self.is_on or not separator or request.prompt_token_ids is None:
            return ()
        return split(request.prompt_token_ids, separator)[:-1]

    def _reason_against(self, request: "Request", rules: RequestRules, part: HandoverPart) -> str:
        reasons = {
            "blend.selector is off": not self.is_on,
            self._refusal: bool(self._refusal),
            "it may not load": not rules.load,
            "it has an adapter": request.lora_request is not None,
            "its prompt is more than text": bool(request.mm_features)
            or request.prompt_token_ids is None
            or request.prompt_embeds is not None,
            "it is a pooling request": bool(request.pooling_params),
            "its prompt is continued later": bool(request.resumable),
            "prefill and decode are on different engines": part != WHOLE_REQUEST,
            "it reads no prefix cache": request.skip_reading_prefix_cache,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _look_up(
        self,
        request: "Request",
        naming: "Future[Prompt | None]",
        spans: Sequence[Span],
        patience_s: float,
    ) -> _Answer | None:
        """On the lookup thread."""
        try:
            prompt = None if naming.cancelled() else naming.result()
            if prompt is None or self._selector is None:
                return None
            space = self._namespace()
            permit = self._permits.find(
                permit_model(space), selector_text(self._selector), options=permit_options(space)
            )
            if isinstance(permit, BlendRefusal):
                self._refuse(request, str(permit))
                return None
            parts = []
            for span in spans:
                whole = (span.end - span.start) // self._unit * self._unit
                if whole and span.start + whole <= prompt.num_tokens:
                    part = Span(span.start, span.start + whole)
                    parts.append((part, span_prompt(prompt, part), span.end))
            if not parts:
                self._refuse(request, f"its spans are shorter than {self._unit} tokens")
                return None
            held = self._cache.spans(
                [text.query() for _, text, _ in parts], wait_s=0, deadline_s=patience_s
            )
            return _Answer(prompt, parts, permit, held)
        except (KVHoldError, ValueError) as error:
            self._refuse(request, str(error))
        except Exception:
            log.exception("kvhold: lookup of spans")
        return None

    @property
    def _unit(self) -> int:
        """Stored spans have a multiple of it."""
        layout = self._namespace().layout
        return (layout.tail_tokens if self._config.store_tails else 0) or layout.tokens_per_chunk

    def _has_answer(self, blend: BlendRequest) -> bool:
        assert blend.lookup is not None
        if not blend.lookup.done():
            return False
        answer = blend.lookup.result()
        if answer is not None and answer.held.arriving:
            waited_s = time.monotonic() - blend.asked_s
            is_late = waited_s > self._config.client.arrival_timeout_s
            blend.lookup = self._thread.submit(_refresh, answer, is_late)
            return False
        blend.lookup, blend.answer = None, answer
        return True

    def _plan(self, answer: _Answer, num_exact: int, most: int, *, stores: bool) -> None:
        hits = {held.number: held.hit for held in answer.held}
        size = self._namespace().layout.tokens_per_chunk
        loads, reports = [], []
        for number, (span, text, text_end) in enumerate(answer.parts):
            skip, end = max(0, num_exact - span.start), min(span.end, most)
            if span.start + skip >= end:
                continue
            hit = hits.get(number)
            known = hit.num_tokens if hit is not None else 0
            is_held = hit is not None and known == span.num_tokens
            is_stored = not is_held and stores
            loads.append(
                SpanLoad(
                    span.start,
                    end,
                    skip,
                    span.num_tokens,
                    text_end,
                    hit.ticket if hit is not None and is_held else 0,
                    text.chunks(known // size) if is_stored else None,
                )
            )
            reports.append(span_report(span, answer.held.hit_of(number), is_alone=not is_held))
        answer.loads, answer.reports = tuple(loads), tuple(reports)

    def _refuse(self, request: "Request", cause: str) -> None:
        cause = cause.removeprefix("served without blend: ")
        if cause not in self._causes and len(self._causes) < _MOST_CAUSES:
            self._causes.add(cause)
            log.warning(
                "kvhold: request %s and others like it are served without blend: %s",
                request.request_id,
                cause,
            )
        self._thread.submit(
            report,
            self._cache,
            BlendReport(
                request.request_id[:MOST_NAME],
                "refused",
                request.num_prompt_tokens,
                selector=self._selector_text,
                note=cause[:MOST_NOTE],
            ),
        )


def _refresh(answer: _Answer, is_late: bool) -> _Answer | None:
    try:
        if is_late:
            answer.held.settle()
        else:
            answer.held.refresh()
        return answer
    except KVHoldError as error:
        log.debug("kvhold: lookup of spans: %s", error)
    except Exception:
        log.exception("kvhold: lookup of spans")
    answer.held.close()
    return None


def _close_late(lookup: "Future[_Answer | None]") -> None:
    answer = lookup.result()
    if answer is not None:
        answer.held.close()
