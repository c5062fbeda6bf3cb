"""`Reuse(model, cache)`: generate and forward with KV from the cache.

A prompt's last token is always computed, for its logits. The constructor raises; later faults are
logged, and the model computes. One `Reuse` per thread.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

from kvhold.core.api import Cache
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError, DeviceError, KVHoldError, LayoutError
from kvhold.core.holdings import ABSENT, Lease
from kvhold.core.keys import Prompt
from kvhold.core.rules import RequestRules, check_tags, request_rules
from kvhold.integrations.transformers.calls import AsIs, GenerateCall, forward_call, generate_call
from kvhold.integrations.transformers.geometry import CacheGeometry, geometry_of
from kvhold.integrations.transformers.identity import Identity
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

    reason: why the cache was not fully used; empty if it was
    """

    num_tokens: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    reason: str = ""

    @property
    def num_computed(self) -> int:
        return self.num_tokens - self.num_loaded


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
    num_loaded: int = 0
    num_stored: int = 0
    reason: str = ""

    def result(self) -> ReuseResult:
        return ReuseResult(
            sum(len(prompt.tokens) for prompt in self.prompts),
            self.num_loaded,
            self.num_stored,
            self.reason,
        )


class Reuse:
    """A model whose KV is kept in a cache. `last` is the last call's result."""

    def __init__(
        self,
        model: Any,
        cache: Cache,
        *,
        config: Config | None = None,
        model_id: str = "",
        cache_salt: str = "",
        store_generated: bool = False,
    ) -> None:
        """Inspect the model: four tokens go through it, and its weights are read once.

        model: decoder-only, of transformers 5, in eval mode, with or without PEFT adapters
        config: tokens_per_chunk, copy_threads, allow_unproven and rules apply
        model_id: a name for weights and adapters, which are then not read
        cache_salt: separates callers
        store_generated: store generated tokens, too

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
        """Call `model.generate(inputs, ...)` with cached KV. inputs: [rows, tokens]"""
        work = self._begin(generate_call(self.model, inputs, generation_config, options))
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

        The output has the logits of the computed tokens, or of the last n with `logits_to_keep=n`;
        0 loads nothing.
        """
        work = self._begin(forward_call(self.model, input_ids, options))
        if work is None:
            return self.model(input_ids=input_ids, **{"use_cache": True} | options)
        rest = input_ids[:, work.kv.get_seq_length() :]
        with torch.no_grad():
            output = self.model(
                input_ids=rest, **options | {"past_key_values": work.kv, "use_cache": True}
            )
        self._finish(work)
        return output

    def _begin(self, call: GenerateCall | AsIs) -> _Work | None:
        work = self._named(call) if isinstance(call, GenerateCall) else call
        if isinstance(work, AsIs):
            self._note(logging.INFO, f"not served, the model is called as it is: {work.reason}")
            self.last = ReuseResult(reason=work.reason)
            return None
        try:
            self._load(work)
        except (KVHoldError, ValueError) as error:
            self._failed(work, "nothing is loaded", error)
        self.last = work.result()
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
            if not num_tokens:
                return
            kv = work.geometry.allocated(len(hits), num_tokens)
            view = work.geometry.view(kv)
            transfers: list[Transfer] = []
            try:
                for row, hit in enumerate(hits):
                    lease = self.cache.claim(hit.ticket)
                    if lease is None:
                        raise KVHoldError("the hit was lost before it was claimed")
                    transfers.append(self._fill_row(view, row, held.enter_context(lease)))
            finally:
                wait_for(transfers)
        kv.batch_repeat_interleave(work.call.expand)
        work.kv, work.num_loaded = kv, num_tokens * len(hits)

    def _fill_row(self, view: View, row: int, lease: Lease) -> Transfer:
        places = lease.chunks()
        if (places.offsets == ABSENT).any():
            raise KVHoldError(
                f"the hit has no KV for {int((places.offsets == ABSENT).sum())} of its chunks"
            )
        position = np.arange(int(places.num_tokens.sum()), dtype=np.int64)
        slots = np.where(position < view.rows_per_block, row * view.rows_per_block + position, -1)
        return self._copier.scatter(
            [Piece(view, slots, lease.buffer, places, "slots")], after=self._copier.mark()
        )

    def _finish(self, work: _Work, sequences: Any = None) -> None:
        """sequences: [rows * expand, tokens], the output of `generate`."""
        if work.reason or not self.rules.store:
            return
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
