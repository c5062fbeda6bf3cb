"""`Reuse(model, cache)`: generate and forward with KV from the cache.

A prompt's last token is always computed. The constructor raises; later faults are logged, and the
model computes. One `Reuse` per thread.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

from kvhold.blend.canary import Drift
from kvhold.blend.permits import BlendRefusal, Permit
from kvhold.blend.selection import BlendPlan, StoredSpan
from kvhold.blend.spans import Span, span_prompt
from kvhold.core.api import Cache, Hit
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError, DeviceError, KVHoldError, LayoutError
from kvhold.core.holdings import ABSENT, Lease
from kvhold.core.keys import Prompt
from kvhold.core.rules import RequestRules, check_tags, request_rules
from kvhold.integrations.transformers.blend_reports import BlendReports
from kvhold.integrations.transformers.blending import Blender
from kvhold.integrations.transformers.calls import AsIs, GenerateCall, forward_call, generate_call
from kvhold.integrations.transformers.gate import BlendGate, compute_in_full
from kvhold.integrations.transformers.geometry import CacheGeometry, geometry_of
from kvhold.integrations.transformers.identity import Identity
from kvhold.integrations.transformers.marked import Blend
from kvhold.integrations.versions import warn_if_untested
from kvhold.memory.copier import Copier, Piece, Transfer, wait_for
from kvhold.memory.copy import warm_up
from kvhold.memory.device import proven_copier_for
from kvhold.memory.device.streams import device_errors
from kvhold.memory.views import View

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReuseResult:
    """The result of one call, in tokens over all rows.

    num_loaded:  with exact KV
    num_blended: of spans, with KV that is not exact
    reason:      why the cache was not fully used; empty if it was
    drift:       of a canary
    """

    num_tokens: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    reason: str = ""
    num_blended: int = 0
    drift: Drift | None = None

    @property
    def num_computed(self) -> int:
        return self.num_tokens - self.num_loaded - self.num_blended


@dataclass
class _Work:
    """known: [rows] tokens that the cache had
    kv: past_key_values, [rows * expand, heads, tokens, head_dim] per layer
    """

    call: GenerateCall
    geometry: CacheGeometry
    prompts: list[Prompt]
    known: list[int]
    kv: DynamicCache
    spans: tuple[Span, ...] = ()
    num_loaded: int = 0
    num_stored: int = 0
    num_blended: int = 0
    is_blended: bool = False
    reason: str = ""
    refusal: str = ""
    drift: Drift | None = None

    def result(self) -> ReuseResult:
        return ReuseResult(
            sum(len(prompt.tokens) for prompt in self.prompts),
            self.num_loaded,
            self.num_stored,
            "; ".join(filter(None, (self.refusal, self.reason))),
            self.num_blended,
            self.drift,
        )


@dataclass(frozen=True)
class _Part:
    """Tokens that are neither exact nor the last."""

    span: Span
    num_exact: int
    most: int

    @property
    def skip(self) -> int:
        return max(0, self.num_exact - self.span.start)

    @property
    def end(self) -> int:
        return min(self.span.end, self.most) - self.span.start

    def stored(self, end: int) -> list[StoredSpan]:
        start = self.span.start
        if self.skip >= end:
            return []
        return [StoredSpan(start + self.skip, start + end, self.skip, text_end=self.span.end)]

    def copy(self, alone: DynamicCache, kv: DynamicCache) -> None:
        source = slice(self.skip, self.end)
        target = slice(self.span.start + self.skip, self.span.start + self.end)
        for ours, theirs in zip(kv.layers, alone.layers, strict=True):
            ours.keys[:, :, target] = theirs.keys[:, :, source]
            ours.values[:, :, target] = theirs.values[:, :, source]


class Reuse:
    """A model with a cache. `last` is the last call's result."""

    def __init__(
        self,
        model: Any,
        cache: Cache,
        *,
        config: Config | None = None,
        model_id: str = "",
        cache_salt: str = "",
        store_generated: bool = False,
        blend: Blend | None = None,
    ) -> None:
        """Inspect the model: four tokens go through it, and its weights are read once.

        model: decoder-only, of transformers 5, in eval mode, with or without PEFT adapters
        config: tokens_per_chunk, copy_threads, allow_unproven, rules and blend apply
        model_id: a name for weights and adapters, which are then not read
        cache_salt: separates callers
        store_generated: store generated tokens, too
        blend: reuse KV of marked spans wherever they stand, if there is a permit; not exact

        Raises LayoutError for an unproven model, ConfigError for unreadable weights.
        """
        warn_if_untested("transformers", transformers.__version__)
        config = config or load_config()
        if config.memory_codec != "none":
            raise ConfigError(
                f"memory_codec = {config.memory_codec!r}: the KV of transformers is kept "
                "as it is; leave this setting out"
            )
        self.model = model
        self.cache = cache
        self.last = ReuseResult()
        self._settings = config.rules
        self._rules = request_rules(None, config.rules)
        self._store_generated = store_generated
        self._tokens_per_chunk = config.tokens_per_chunk
        self._threads = config.copy_threads
        self._allow_unproven = config.allow_unproven
        self._identity = Identity(model, model_id=model_id, cache_salt=cache_salt)
        self._registered = b""
        self._noted = ""
        self._copies_on = ""
        self._refused: tuple[Any, str] | None = None
        self._copier: Copier
        self._geometry = self._look()
        self._identity.namespace(self._geometry.layout)
        self._blend = blend or Blend.of(config.blend)
        self._refusal_noted = ""
        self._blender: Blender
        self._gate: BlendGate
        self._reports: BlendReports
        if self._blend is not None:
            self._reports = BlendReports(cache, self._blend.selector)
            self._blender = Blender(model, self._geometry)
            self._gate = BlendGate(config.blend, self._blend.selector)

    @property
    def rules(self) -> RequestRules:
        return self._rules

    @rules.setter
    def rules(self, rules: RequestRules) -> None:
        """Raises ConfigError: another tenant."""
        check_tags(rules.tags, self._settings)
        self._rules = rules

    def generate(
        self, inputs: Any = None, generation_config: GenerationConfig | None = None, **options: Any
    ) -> Any:
        """Call `model.generate(inputs, ...)` with cached KV.

        inputs: [rows, tokens]
        spans:  pairs of first token and end, for `blend`

        Raises ValueError: spans that make no sense.
        """
        marks = options.pop("spans", None)
        work = self._begin(generate_call(self.model, inputs, generation_config, options), marks)
        if work is None:
            return self.model.generate(inputs, generation_config=generation_config, **options)
        others = {
            name: value
            for name, value in options.items()
            if name not in ("input_ids", "past_key_values")
        }
        output = self.model.generate(
            work.call.input_ids,
            generation_config=generation_config,
            past_key_values=work.kv,
            **others,
        )
        self._finish(
            work, sequences=output if isinstance(output, torch.Tensor) else output.sequences
        )
        return output

    def forward(self, input_ids: Any, **options: Any) -> Any:
        """Call `model(input_ids, use_cache=True, **options)` with cached KV, without gradients.

        input_ids: [rows, tokens]
        spans:     as for `generate`

        The output has the logits of the computed tokens, or of the last n with `logits_to_keep=n`;
        0 loads nothing.
        """
        marks = options.pop("spans", None)
        work = self._begin(forward_call(self.model, input_ids, options), marks)
        if work is None:
            return self.model(input_ids=input_ids, **{"use_cache": True} | options)
        rest = input_ids[:, work.kv.get_seq_length() :]
        with torch.no_grad():
            output = self.model(
                input_ids=rest, **options | {"past_key_values": work.kv, "use_cache": True}
            )
        self._finish(work)
        return output

    def _begin(self, call: GenerateCall | AsIs, marks: Any) -> _Work | None:
        if marks is not None and self._blend is None:
            raise ValueError("spans are given, but no blend; use Reuse(model, cache, blend=...)")
        work = self._named(call) if isinstance(call, GenerateCall) else call
        if isinstance(work, AsIs):
            self._note(logging.INFO, f"not served, the model is called as it is: {work.reason}")
            self.last = ReuseResult(reason=work.reason)
            return None
        if self._blend is not None:
            work.spans = self._blend.spans(work.call, marks)
        try:
            self._load(work)
        except (KVHoldError, ValueError) as error:
            self._failed(work, "nothing is loaded", error)
        self.last = work.result()
        if work.spans and self.rules.load:
            self._reports.report(self.last, is_blended=work.is_blended)
        return work

    def _named(self, call: GenerateCall) -> _Work | AsIs:
        try:
            geometry = self._current_geometry()
            namespace = self._identity.namespace(geometry.layout).narrowed(tags=self.rules.tags)
            prompts = [namespace.prompt(row) for row in call.tokens()]
        except (KVHoldError, ValueError) as error:
            return AsIs(str(error))
        return _Work(call, geometry, prompts, [0] * len(prompts), geometry.empty())

    def _load(self, work: _Work) -> None:
        if work.prompts[0].namespace.layout.fingerprint != self._registered:
            self.cache.register(work.prompts[0].namespace)
            self._registered = work.prompts[0].namespace.layout.fingerprint
        if not self.rules.load:
            return
        with ExitStack() as held:
            hits = [
                held.enter_context(self.cache.lookup(prompt.query(), uses=self.rules.uses))
                for prompt in work.prompts
            ]
            work.known = [hit.num_tokens for hit in hits]
            num_tokens = min(work.call.most, *work.known)
            spans = [_Part(span, num_tokens, work.call.most) for span in work.spans]
            spans = [part for part in spans if part.skip < part.end]
            permit = self._permit(work) if spans else None
            if permit is None:
                spans = []
            if not num_tokens and not spans:
                return
            length = work.call.input_ids.shape[1]
            kv = work.geometry.allocated(len(hits), length if spans else num_tokens)
            view = work.geometry.view(kv)
            firsts = range(0, len(hits) * view.rows_per_block, view.rows_per_block)
            self._fill(
                view, [(first, 0, num_tokens, hit) for first, hit in zip(firsts, hits, strict=True)]
            )
        if permit is not None:
            work.is_blended = True
            work.num_blended = self._blend_spans(work, kv, spans, num_tokens)
            if self._gate.is_due(permit):
                kv, num_tokens = self._compare(work, kv, permit), 0
        kv.batch_repeat_interleave(work.call.expand)
        work.kv, work.num_loaded = kv, num_tokens * len(hits)

    def _permit(self, work: _Work) -> Permit | None:
        found = self._gate.find(work.prompts[0].namespace)
        if isinstance(found, BlendRefusal):
            self._refuse_blend(work, str(found))
            return None
        self._refusal_noted = ""
        return found

    def _compare(self, work: _Work, kv: DynamicCache, permit: Permit) -> DynamicCache:
        """A canary: return exact KV."""
        full, work.drift = compute_in_full(self.model, work.geometry, work.call.input_ids, kv)
        if refusal := self._gate.record(work.prompts[0].namespace, permit, work.drift):
            self._refuse_blend(work, refusal)
        work.is_blended, work.num_blended = False, 0
        return full

    def _refuse_blend(self, work: _Work, refusal: str) -> None:
        work.refusal = refusal
        if refusal != self._refusal_noted:
            log.warning("kvhold: %s", refusal)
        self._refusal_noted = refusal

    def _fill(self, view: View, parts: list[tuple[int, int, int, Hit]]) -> None:
        """parts: the slot of a hit's first token; its tokens from the second to before the third
        number are loaded
        """
        transfers: list[Transfer] = []
        with ExitStack() as held:
            try:
                for first, skip, end, hit in parts:
                    if skip >= end:
                        continue
                    lease = self.cache.claim(hit.ticket)
                    if lease is None:
                        raise KVHoldError("the hit was lost before it was claimed")
                    held.enter_context(lease)
                    transfers.append(self._fill_part(view, first, skip, end, lease))
            finally:
                wait_for(transfers)

    def _fill_part(self, view: View, first: int, skip: int, end: int, lease: Lease) -> Transfer:
        places = lease.chunks()
        if (places.offsets == ABSENT).any():
            raise KVHoldError(
                f"the hit has no KV for {int((places.offsets == ABSENT).sum())} of its chunks"
            )
        token = np.arange(int(places.num_tokens.sum()), dtype=np.int64)
        slots = np.where((skip <= token) & (token < end), first + token, -1)
        return self._copier.scatter(
            [Piece(view, slots, lease.buffer, places, "slots")], after=self._copier.mark()
        )

    def _blend_spans(
        self, work: _Work, kv: DynamicCache, parts: list[_Part], num_exact: int
    ) -> int:
        """Return the number of tokens whose KV is not exact. Missing spans are computed alone, so
        that none has another text's content.
        """
        assert self._blend is not None
        prompts = [span_prompt(work.prompts[0], part.span) for part in parts]
        view, stored, missing = work.geometry.view(kv), list[StoredSpan](), list[tuple[int, int]]()
        with self.cache.spans([prompt.query() for prompt in prompts]) as found:
            hits = {held.number: held.hit for held in found}
            fills = []
            for number, part in enumerate(parts):
                hit = hits.get(number)
                known = hit.num_tokens if hit is not None else 0
                if hit is None or known < part.span.num_tokens - 1:
                    missing.append((number, known))
                    continue
                end = min(part.end, known)
                fills.append((part.span.start, part.skip, end, hit))
                stored += part.stored(end)
            self._reports.found([part.span for part in parts], found, dict(missing))
            self._fill(view, fills)
        for number, known in missing:
            part = parts[number]
            alone = self._compute_alone(work, part.span)
            part.copy(alone, kv)
            if self.rules.store:
                work.num_stored += self._store(work.geometry.view(alone), 0, prompts[number], known)
            stored += part.stored(part.end)
        # with the last tokens, too: selectors must see the whole question
        length = work.call.input_ids.shape[1]
        plan = BlendPlan(length, tuple(sorted(stored, key=_start)), num_exact)
        blended = self._blender.prefill(work.call.input_ids, kv, plan, self._blend.selector)
        kv.crop(work.call.most - length)
        return blended.num_reused

    def _compute_alone(self, work: _Work, span: Span) -> DynamicCache:
        kv = work.geometry.empty()
        with torch.no_grad():
            self.model(
                input_ids=work.call.input_ids[:, span.start : span.end],
                past_key_values=kv,
                use_cache=True,
                logits_to_keep=1,
            )
        return kv

    def _finish(self, work: _Work, sequences: Any = None) -> None:
        """sequences: [rows * expand, tokens]"""
        if work.reason or not self.rules.store or work.is_blended:
            return  # what follows a blended span is not exact
        try:
            view = _filled(work)
            for row, prompt in enumerate(work.prompts):
                work.num_stored += self._store(
                    view, row * work.call.expand, prompt, work.known[row]
                )
            if self._store_generated and sequences is not None and not work.call.searched:
                work.num_stored += self._store_sequences(view, work.prompts[0], sequences)
        except (KVHoldError, ValueError) as error:
            self._failed(work, "not everything is stored", error)
        if not work.reason:
            self._noted = ""
        self.last = work.result()
        log.debug("%s", self.last)

    def _store(
        self, view: View, block: int, prompt: Prompt, known: int, *, tail: bool = True
    ) -> int:
        """Store KV from `block` on, after the first `known` tokens. Returns the tokens."""
        length, layout = len(prompt.tokens), prompt.namespace.layout
        names = prompt.chunks(
            known // layout.tokens_per_chunk, tail=tail and length % layout.tokens_per_chunk > 1
        )
        if known == length or not len(names):
            return 0
        with self.cache.reserve(
            layout, names, store_options=self.rules.store_options
        ) as reservation:
            places = reservation.chunks()
            granted = places.offsets != ABSENT
            if not granted.any():
                return 0
            slots = np.arange(int(places.num_tokens.sum()), dtype=np.int64) + (
                block * view.rows_per_block + names.first_token
            )
            wait_for(
                [
                    self._copier.gather(
                        [Piece(view, slots, reservation.buffer, places, "slots")],
                        after=self._copier.mark(),
                    )
                ]
            )
            reservation.commit()
        return int(places.num_tokens[granted].sum())

    def _store_sequences(self, view: View, prompt: Prompt, sequences: Any) -> int:
        size = prompt.namespace.layout.tokens_per_chunk
        first = len(prompt.tokens) // size * size
        rows = sequences[:, : view.rows_per_block].cpu().numpy()
        return sum(
            self._store(view, block, prompt.namespace.prompt(row), first, tail=False)
            for block, row in enumerate(rows)
        )

    def _current_geometry(self) -> CacheGeometry:
        if (self.model.device, self.model.dtype) != self._looked_at:
            self._geometry = self._look()
        return self._geometry

    def _look(self) -> CacheGeometry:
        geometry = geometry_of(self.model, tokens_per_chunk=self._tokens_per_chunk)
        looks = self.model.device, self.model.dtype
        if self._refused is not None and self._refused[0] == looks:
            raise LayoutError(self._refused[1])
        device = str(geometry.device)
        if device != self._copies_on:
            try:
                self._copier = proven_copier_for(
                    device,
                    threads=self._threads,
                    cache=self.cache,
                    allow_unproven=self._allow_unproven,
                    shown_on_nvidia=True,
                )
            except (LayoutError, DeviceError) as error:
                self._refused = looks, str(error)
                raise
            self._copies_on = device
        # compile the copy kernel now: later caches have equal rows
        with device_errors():
            warm_up(device, [geometry.view(geometry.allocated(1, self._tokens_per_chunk))])
        self._looked_at = looks
        return geometry

    def _failed(self, work: _Work, what: str, error: Exception) -> None:
        work.reason = f"{what}: {error}"
        self._note(logging.WARNING, work.reason)
        if not isinstance(error, KVHoldError):
            log.debug("kvhold: %s", what, exc_info=error)

    def _note(self, level: int, text: str) -> None:
        log.log(logging.DEBUG if text == self._noted else level, "kvhold: %s", text)
        self._noted = text


def _start(span: StoredSpan) -> int:
    return span.start


def _filled(work: _Work) -> View:
    """Raises LayoutError unless the cache holds every prompt token."""
    view = work.geometry.view(work.kv)
    rows, length = len(work.prompts) * work.call.expand, len(work.prompts[0].tokens)
    if view.num_blocks != rows or view.rows_per_block < length:
        held = f"{view.num_blocks} rows of {view.rows_per_block} tokens"
        raise LayoutError(
            f"the model left {held} in its cache; the prompts are {rows} rows of {length}"
        )
    return view
