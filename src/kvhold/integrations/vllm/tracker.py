"""The connector's record of one request: its computed tokens and its stored chunks.

No I/O, no vLLM.

    tracker.start(computed_tokens)      # the request is scheduled, or again after a preemption
    tracker.advance(scheduled_tokens)   # the step just planned computes so many tokens
    tracker.take(request.all_token_ids) # names of the chunks that become whole in that step, once
    tracker.finish(request.all_token_ids, num_blocks)   # the request has ended: the rest

The tokens computed after a step are those at the request's start (hits of kvhold or of the engine)
plus the sum of the tokens scheduled since. Only tokens with certain ids are named. A prompt's ids
are certain from the beginning. A generated token's id is certain once the token was sampled and
accepted, that is, once it is in `all_token_ids`. A draft is not certain, nor is a placeholder for a
token that a pass under way will sample.

A step therefore stores the KV of the first min(computed, known) tokens. All of this KV is final
when the step's pass has run:

- One pass at a time: the last sampled token is known, and the step being planned computes its KV.
- Passes under way (asynchronous scheduling): fewer tokens are known than will be computed. A pass
  that is over sampled the last known token. This request's next pass, which is under way or being
  planned, computes its KV.
- Drafts: some scheduled drafts are rejected, and the sum is too large until `advance` gets the
  engine's own count. This does no harm. While a prompt is computed there are no drafts, and the sum
  is exact. Later, each pass begins with the last token that the pass before it sampled. So every
  known token is computed, and the known tokens are the smaller number.

When a request ends, it has no further pass. The KV of its last token is not computed and is left
out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.core.keys import ChunkNames, GrowingPrompt, Prompt


@dataclass
class RequestTracker:
    """The progress of one request.

    prompt: the part of the prompt that may be stored: all, or all but its last `skip_last_n_tokens`
        (`Prompt.until`). With save_decode, after a preemption, it includes the generated tokens
    save_decode: store generated tokens too
    store_tails: store the blocks after the last whole chunk when the prompt is computed, and with
        save_decode when the request ends
    skip_last_n_tokens: with save_decode, do not store the last tokens of the known text either
    start_tokens: tokens computed when the request started or resumed
    num_scheduled_tokens: tokens scheduled since then
    taken_back_tokens: scheduled tokens that the engine does not count any more
    next_chunk: the first chunk that is not known to be in the cache
    known_tail: end of the tail that is known to be in the cache, in tokens; 0: none
    _text: the prompt and the generated text as far as it was named: to a chunk's end, or after the
        request's end to the tail
    """

    prompt: Prompt
    save_decode: bool = False
    store_tails: bool = True
    skip_last_n_tokens: int = 0
    start_tokens: int = 0
    num_scheduled_tokens: int = 0
    taken_back_tokens: int = 0
    next_chunk: int = 0
    known_tail: int = 0
    _text: GrowingPrompt | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt whose KV is in blocks once the scheduled steps have run."""
        return min(self.prompt.num_tokens, self._counted)

    def found(self, hit_tokens: int) -> None:
        """Record that the cache holds the first `hit_tokens` tokens; they are not stored again."""
        self.next_chunk, tail = divmod(hit_tokens, self._chunk)
        self.known_tail = hit_tokens if tail else 0

    def start(self, computed_tokens: int) -> None:
        """Record that the request starts or resumes with `computed_tokens` computed tokens.

        If the cache had more, chunks beyond `computed_tokens` count as not stored.
        """
        self.start_tokens = computed_tokens
        self.num_scheduled_tokens = self.taken_back_tokens = 0
        # + 1: if a hit covers the whole text, its last token is computed again
        self._keep(computed_tokens + 1)

    def advance(self, scheduled_tokens: int, computed_tokens: int | None = None) -> None:
        """Record that a step computes `scheduled_tokens` more tokens, with drafts and placeholders.

        computed_tokens: the engine's count of computed tokens before that step, if known. A count
            below the tracker's own means that drafts were rejected, or that a load beside a pass
            failed. Chunks beyond the count then count as not stored.
        """
        if computed_tokens is not None and computed_tokens < self._counted:
            self.taken_back_tokens += self._counted - computed_tokens
            self._keep(computed_tokens)
        self.num_scheduled_tokens += scheduled_tokens

    def take(self, token_ids: Sequence[int] = ()) -> ChunkNames | None:
        """Return the chunks that are whole after the last step and not taken yet; None: none.

        They include the prompt's tail once the prompt is whole. Gather them after that step's pass
        and before the request's next one.

        token_ids: with save_decode, the request's certain tokens: the prompt and the accepted
            tokens
        """
        return self._take(self._end(len(token_ids)), token_ids)

    def _take(self, end: int, token_ids: Sequence[int]) -> ChunkNames | None:
        """Return the whole chunks of the first `end` tokens that are not taken yet; None: none."""
        whole, first = end // self._chunk, self.next_chunk
        tail_tokens = (
            self._prompt_tail
            if end >= self.prompt.num_tokens and first <= whole == self.prompt.num_whole
            else 0
        )
        if whole <= first and not tail_tokens:
            return None
        if whole <= self.prompt.num_whole:
            names = self.prompt.chunks(first, last=whole, tail=bool(tail_tokens))
        else:
            names = self._grown(token_ids, whole * self._chunk).chunks(
                first, last=whole, tail=False
            )
        return self._taken(names, whole)

    def finish(self, token_ids: Sequence[int], num_blocks: int) -> ChunkNames | None:
        """Return the remaining chunks after the request's end; None: none.

        They became whole since the last `take`. With save_decode they include the tail of the
        generated text. Gather them after the passes that were under way, and before the engine
        reuses the request's blocks.

        token_ids:  the request's certain tokens, with the last sampled one
        num_blocks: the number of blocks that the request still has; 0 if it ended while preempted
        """
        end = min(self._end(len(token_ids)), len(token_ids) - 1, num_blocks * self._block)
        if end <= self.prompt.num_tokens:
            return self._take(end, token_ids)  # empty, unless the lookup's answer came late
        whole, first = end // self._chunk, self.next_chunk
        if whole < first:
            return None
        text = self._grown(token_ids, end)
        # the tail is () if a chunk beyond `end` was named before a preemption
        lengths = text.tail_lengths if self.store_tails else ()
        tail = bool(lengths) and self.known_tail < whole * self._chunk + lengths[-1]
        if whole == first and not tail:
            return None
        return self._taken(text.chunks(first, last=whole, tail=tail), whole)

    @property
    def _chunk(self) -> int:
        return self.prompt.namespace.layout.tokens_per_chunk

    @property
    def _block(self) -> int:
        """Tokens in a block; in a chunk, if there are no tails."""
        return self.prompt.namespace.layout.tail_tokens or self._chunk

    @property
    def _counted(self) -> int:
        return self.start_tokens + self.num_scheduled_tokens - self.taken_back_tokens

    def _end(self, num_known: int) -> int:
        """Count the first tokens that are certain, and computed after the scheduled steps."""
        known = num_known - self.skip_last_n_tokens if self.save_decode else 0
        return min(max(self.prompt.num_tokens, known), self._counted)

    @property
    def _prompt_tail(self) -> int:
        """Tokens in the prompt's tail; 0 if it is not to be stored, or is known to be cached."""
        lengths = self.prompt.tail_lengths if self.store_tails else ()
        end = self.prompt.num_whole * self._chunk + (lengths[-1] if lengths else 0)
        return lengths[-1] if lengths and self.known_tail < end else 0

    def _grown(self, token_ids: Sequence[int], end: int) -> GrowingPrompt:
        """Return the text, named up to `end` tokens, or further if it was before a preemption."""
        text = self._text = self._text or self.prompt.growing()
        if text.num_tokens < end:
            text.append(token_ids[text.num_tokens : end])
        return text

    def _keep(self, num_tokens: int) -> None:
        """Treat chunks beyond the first `num_tokens` tokens as not in the cache."""
        self.next_chunk = min(self.next_chunk, num_tokens // self._chunk)
        self.known_tail = self.known_tail if self.known_tail <= num_tokens else 0

    def _taken(self, names: ChunkNames, whole: int) -> ChunkNames:
        self.next_chunk = max(self.next_chunk, whole)
        if names.tail_tokens:
            self.known_tail = whole * self._chunk + names.tail_tokens
        return names
