"""Generate and forward with KV from the cache: `Reuse(model, cache)`.

    look up the prompt's longest known prefix -> load it into a DynamicCache -> let the model go on from there -> store what was missing

The model is called through its own public interface, with a filled cache as `past_key_values`; nothing in it is patched. The last
token of a prompt is always computed, because its logits are needed. Whatever goes wrong on the cache's side is logged and only means
that the model computes: no error of ours reaches the caller after the constructor. Between two calls nothing is held in the cache.
Any one thread at a time; two threads use two `Reuse` objects. Left out on purpose: padded batches, sliding windows, caches that the
caller fills (calls with any of these go to the model as they are).
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig

from kvhold.core.api import ABSENT, Cache, Loan
from kvhold.core.config import Config, load_config
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.keys import Prompt
from kvhold.core.rules import Rules, check_tags, request_rules
from kvhold.integrations.transformers.calls import AsIs, Call, forward_call, generate_call
from kvhold.integrations.transformers.geometry import Geometry, geometry_of
from kvhold.integrations.transformers.identity import Identity
from kvhold.memory.copy import gather_slots, scatter_slots, warm_up
from kvhold.memory.views import View

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What one call did, in tokens over all rows of its batch.

    num_tokens: of the prompts
    num_loaded: that were loaded instead of computed
    num_stored: that are in the cache now and were not before, those of a prompt and, if asked for, generated ones
    reason:     why the cache was not used, or not fully; empty if all went well
    """

    num_tokens: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    reason: str = ""

    @property
    def num_computed(self) -> int:
        """Tokens of the prompts that the model computed."""
        return self.num_tokens - self.num_loaded


@dataclass
class _Work:
    """One call under way.

    prompts: one a row
    known:   [rows] tokens of each row that the cache had when it was asked
    kv:      what the model is given as past_key_values, [rows * expand, heads, tokens, head_dim] a layer
    """

    call: Call
    geometry: Geometry
    prompts: list[Prompt]
    known: list[int]
    kv: DynamicCache
    num_loaded: int = 0
    num_stored: int = 0
    reason: str = ""

    def outcome(self) -> Outcome:
        return Outcome(sum(len(prompt.tokens) for prompt in self.prompts), self.num_loaded, self.num_stored, self.reason)


class Reuse:
    """A model whose KV is kept in a cache. `last` says what the last call did; `rules` what the next ones may do with the cache."""

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
        """Look at the model: four tokens go through it, and its weights are read once.

        model:  a decoder-only language model of transformers 5 in eval mode, adapters of PEFT included
        config: whose tokens_per_chunk and copy_threads count; by default what the environment and the settings file say
        model_id: a name for the weights, adapters included, instead of reading them; whoever gives it changes it when they change
        cache_salt: text that separates callers who must not share KV
        store_generated: store the KV of what `generate` produced, too, so that the next turn of a conversation finds it

        Raises LayoutError for a model whose KV is not proven to come back exactly, ConfigError for weights that cannot be read.
        """
        config = config or load_config()
        self.model = model
        self.cache = cache
        self.last = Outcome()
        self._settings = config.rules
        self._rules = request_rules(None, config.rules)
        self._store_generated = store_generated
        self._tokens_per_chunk = config.tokens_per_chunk
        self._threads = config.copy_threads or 2
        self._identity = Identity(model, model_id=model_id, cache_salt=cache_salt)
        self._registered = b""  # fingerprint of the layout that the cache knows
        self._noted = ""
        self._geometry = self._look()
        self._identity.namespace(self._geometry.layout)

    @property
    def rules(self) -> Rules:
        """What the next calls may do with the cache."""
        return self._rules

    @rules.setter
    def rules(self, rules: Rules) -> None:
        """Raises ConfigError for rules of another tenant than the configured one."""
        check_tags(rules.tags, self._settings)
        self._rules = rules

    def generate(self, inputs: Any = None, generation_config: GenerationConfig | None = None, **options: Any) -> Any:
        """As `model.generate(inputs, generation_config, **options)`; the prompt, [rows, tokens], may also be given as `input_ids`."""
        work = self._begin(generate_call(self.model, inputs, generation_config, options))
        if work is None:
            return self.model.generate(inputs, generation_config=generation_config, **options)
        others = {name: value for name, value in options.items() if name not in ("input_ids", "past_key_values")}
        output = self.model.generate(work.call.input_ids, generation_config=generation_config, past_key_values=work.kv, **others)
        self._finish(work, sequences=output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def forward(self, input_ids: Any, **options: Any) -> Any:
        """As `model(input_ids, use_cache=True, **options)` without gradients: the model's output, its past_key_values filled.

        input_ids: [rows, tokens]

        The logits are those of the tokens that were computed, the last of each row among them. `logits_to_keep=n` asks for the last n,
        so that n tokens are computed; `logits_to_keep=0` for all: then nothing is loaded, but the KV is stored.
        """
        work = self._begin(forward_call(self.model, input_ids, options))
        if work is None:
            return self.model(input_ids=input_ids, **{"use_cache": True} | options)
        rest = input_ids[:, work.kv.get_seq_length() :]
        with torch.no_grad():
            output = self.model(input_ids=rest, **options | {"past_key_values": work.kv, "use_cache": True})
        self._finish(work)
        return output

    def _begin(self, call: Call | AsIs) -> _Work | None:
        """Name the prompts, look them up and load what is there. None if the model is to be called as the caller called us."""
        work = self._named(call) if isinstance(call, Call) else call
        if isinstance(work, AsIs):
            self._note(logging.INFO, f"not served, the model is called as it is: {work.reason}")
            self.last = Outcome(reason=work.reason)
            return None
        try:
            self._load(work)
        except (KVHoldError, ValueError) as error:
            self._failed(work, "nothing is loaded", error)
        self.last = work.outcome()
        return work

    def _named(self, call: Call) -> _Work | AsIs:
        try:
            geometry = self._current_geometry()
            namespace = self._identity.namespace(geometry.layout).narrowed(tags=self.rules.tags)
            prompts = [namespace.prompt(row) for row in call.tokens()]
        except (KVHoldError, ValueError) as error:
            return AsIs(str(error))
        return _Work(call, geometry, prompts, [0] * len(prompts), geometry.empty())

    def _load(self, work: _Work) -> None:
        """Give the work a cache filled with what all rows have of their prompts, or none. Whatever is held for it is given back."""
        if work.prompts[0].namespace.layout.fingerprint != self._registered:
            self.cache.register(work.prompts[0].namespace)
            self._registered = work.prompts[0].namespace.layout.fingerprint
        if not self.rules.load:
            return
        with ExitStack() as held:
            hits = [held.enter_context(self.cache.lookup(prompt.query())) for prompt in work.prompts]
            work.known = [hit.num_tokens for hit in hits]
            num_tokens = min(work.call.most, *work.known)
            if not num_tokens:
                return
            kv = work.geometry.allocated(len(hits), num_tokens)
            view = work.geometry.view(kv)
            for row, hit in enumerate(hits):
                loan = self.cache.claim(hit.ticket)
                if loan is None:
                    raise KVHoldError("the hit was lost before it was claimed")
                _fill_row(view, row, held.enter_context(loan), threads=self._threads)
            _wait(view)
        kv.batch_repeat_interleave(work.call.expand)
        work.kv, work.num_loaded = kv, num_tokens * len(hits)

    def _finish(self, work: _Work, sequences: Any = None) -> None:
        """Store what the model has computed. `sequences`: [rows * expand, tokens], what generate made of the prompts."""
        if work.reason or not self.rules.store:  # the cache was in trouble a moment ago; one deadline a call is enough
            return
        try:
            view = _filled(work)
            for row, prompt in enumerate(work.prompts):
                work.num_stored += self._store(view, row * work.call.expand, prompt, work.known[row])
            if self._store_generated and sequences is not None and not work.call.searched:
                work.num_stored += self._store_sequences(view, work.prompts[0], sequences)
        except (KVHoldError, ValueError) as error:
            self._failed(work, "not everything is stored", error)
        if not work.reason:
            self._noted = ""
        self.last = work.outcome()
        log.debug("%s", self.last)

    def _store(self, view: View, block: int, prompt: Prompt, known: int, *, tail: bool = True) -> int:
        """Store what `prompt`, which lies in one block of the view, has after its first `known` tokens. Returns how many tokens."""
        length, layout = len(prompt.tokens), prompt.namespace.layout
        # A tail of one token would never be read: the last token of a prompt is computed.
        names = prompt.chunks(known // layout.tokens_per_chunk, tail=tail and length % layout.tokens_per_chunk > 1)
        if known == length or not len(names):
            return 0
        with self.cache.reserve(layout, names, terms=self.rules.terms) as room:
            places = room.chunks()
            granted = places.offsets != ABSENT
            if not granted.any():
                return 0
            slots = np.arange(int(places.num_tokens.sum()), dtype=np.int64) + (block * view.rows_per_block + names.first_token)
            try:
                gather_slots(view, slots, room.buffer, places, threads=self._threads)
            finally:
                _wait(view)
            room.commit()
        return int(places.num_tokens[granted].sum())

    def _store_sequences(self, view: View, prompt: Prompt, sequences: Any) -> int:
        """Store the whole chunks after the prompt's. The last token of a sequence was never put through the model and has no KV."""
        size = prompt.namespace.layout.tokens_per_chunk
        first = len(prompt.tokens) // size * size
        rows = sequences[:, : view.rows_per_block].cpu().numpy()
        return sum(self._store(view, block, prompt.namespace.prompt(row), first, tail=False) for block, row in enumerate(rows))

    def _current_geometry(self) -> Geometry:
        """Looked at again when the model has been moved or converted."""
        if (self.model.device, self.model.dtype) != self._looked_at:
            self._geometry = self._look()
        return self._geometry

    def _look(self) -> Geometry:
        geometry = geometry_of(self.model, tokens_per_chunk=self._tokens_per_chunk)
        self._looked_at = self.model.device, self.model.dtype
        warm_up(str(geometry.device))
        return geometry

    def _failed(self, work: _Work, what: str, error: Exception) -> None:
        work.reason = f"{what}: {error}"
        self._note(logging.WARNING, work.reason)
        if not isinstance(error, KVHoldError):
            log.debug("kvhold: %s", what, exc_info=error)

    def _note(self, level: int, text: str) -> None:
        """Log it, unless it was the last thing noted: a fault that lasts is told once."""
        log.log(logging.DEBUG if text == self._noted else level, "kvhold: %s", text)
        self._noted = text


def _fill_row(view: View, row: int, loan: Loan, *, threads: int) -> None:
    """The first tokens of a loan, as many as the view has places for in a block, into block `row`."""
    places = loan.chunks()
    if (places.offsets == ABSENT).any():  # full attention needs every chunk; rows that nobody writes would be wrong KV
        raise KVHoldError(f"the hit has no KV for {int((places.offsets == ABSENT).sum())} of its chunks")
    position = np.arange(int(places.num_tokens.sum()), dtype=np.int64)
    slots = np.where(position < view.rows_per_block, row * view.rows_per_block + position, -1)
    scatter_slots(view, slots, loan.buffer, places, threads=threads)


def _filled(work: _Work) -> View:
    """The work's cache after the model was called. Raises LayoutError unless it holds every token of every prompt."""
    view = work.geometry.view(work.kv)
    rows, length = len(work.prompts) * work.call.expand, len(work.prompts[0].tokens)
    if view.num_blocks != rows or view.rows_per_block < length:
        held = f"{view.num_blocks} rows of {view.rows_per_block} tokens"
        raise LayoutError(f"the model left {held} in its cache; the prompts are {rows} rows of {length}")
    return view


def _wait(view: View) -> None:
    """Until the copies are done: on a device they are only in its stream, and the arena's memory is about to be given back."""
    if view.device != "cpu":
        torch.accelerator.current_stream(torch.device(view.device)).synchronize()
