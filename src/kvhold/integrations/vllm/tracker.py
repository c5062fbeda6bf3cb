"""Track one request's computed tokens and stored chunks. No I/O, no vLLM.

Known are the prompt's tokens and those in `all_token_ids`, no drafts and placeholders. A step
stores the KV of the first min(computed, known) tokens, final after its pass, because each pass
begins with the last sampled token. An ended request's last token has no KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.core.keys import ChunkNames, GrowingPrompt, Prompt


@dataclass
class RequestTracker:
    """prompt: the part that may be stored. After a preemption, with save_decode, it includes
        generated tokens
    skip_last_n_tokens: with save_decode, leave out the last known tokens
    start_tokens: computed at the start or resume
    taken_back_tokens: scheduled, but not counted by the engine any more
    next_chunk: the first chunk not known to be cached
    known_tail: end of the cached tail, in tokens; 0: none
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
        """Prompt tokens with KV after scheduled steps."""
        return min(self.prompt.num_tokens, self._counted)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose chunks are cached, or were taken to be stored."""
        return min(self.prompt.num_tokens, max(self.next_chunk * self._chunk, self.known_tail))

    def found(self, hit_tokens: int) -> None:
        self.next_chunk, tail = divmod(hit_tokens, self._chunk)
        self.known_tail = hit_tokens if tail else 0

    def start(self, computed_tokens: int) -> None:
        """Chunks beyond `computed_tokens` count as not stored."""
        self.start_tokens = computed_tokens
        self.num_scheduled_tokens = self.taken_back_tokens = 0
        # + 1: after a full hit, the last token is computed again
        self._keep(computed_tokens + 1)

    def advance(self, scheduled_tokens: int, computed_tokens: int | None = None) -> None:
        """scheduled_tokens: including drafts and placeholders
        computed_tokens: the engine's count before the step; chunks beyond count as not stored
        """
        if computed_tokens is not None and computed_tokens < self._counted:
            self.taken_back_tokens += self._counted - computed_tokens
            self._keep(computed_tokens)
        self.num_scheduled_tokens += scheduled_tokens

    def take(self, token_ids: Sequence[int] = ()) -> ChunkNames | None:
        """None: the last step completed no chunks.

        Gather them after that step's pass and before the request's next one.
        """
        return self._take(self._end(len(token_ids)), token_ids)

    def _take(self, end: int, token_ids: Sequence[int]) -> ChunkNames | None:
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

    def take_end(self) -> ChunkNames | None:
        """The prompt's tail to its end, if that is inside a block, and nothing after it was
        computed. Gather it as that of `take`, which is called first.
        """
        num_tokens = self.prompt.num_tokens
        if not self.store_tails or not self.known_tail < num_tokens == self._counted:
            return None
        names = self.prompt.end()
        return names and self._taken(names, self.prompt.num_whole)

    def finish(self, token_ids: Sequence[int], num_blocks: int) -> ChunkNames | None:
        """The remaining chunks of an ended request.

        Gather them after running passes and before the engine reuses the blocks.

        num_blocks: the request's; 0 if it ended while preempted
        """
        end = min(self._end(len(token_ids)), len(token_ids) - 1, num_blocks * self._block)
        if end <= self.prompt.num_tokens:
            return self._take(end, token_ids)  # empty, unless the lookup's answer came late
        whole, first = end // self._chunk, self.next_chunk
        if whole < first:
            return None
        text = self._grown(token_ids, end)
        # empty if a chunk beyond `end` was named
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
        return self.prompt.namespace.layout.tail_tokens or self._chunk

    @property
    def _counted(self) -> int:
        return self.start_tokens + self.num_scheduled_tokens - self.taken_back_tokens

    def _end(self, num_known: int) -> int:
        known = num_known - self.skip_last_n_tokens if self.save_decode else 0
        return min(max(self.prompt.num_tokens, known), self._counted)

    @property
    def _prompt_tail(self) -> int:
        lengths = self.prompt.tail_lengths if self.store_tails else ()
        end = self.prompt.num_whole * self._chunk + (lengths[-1] if lengths else 0)
        return lengths[-1] if lengths and self.known_tail < end else 0

    def _grown(self, token_ids: Sequence[int], end: int) -> GrowingPrompt:
        text = self._text = self._text or self.prompt.growing()
        if text.num_tokens < end:
            text.append(token_ids[text.num_tokens : end])
        return text

    def _keep(self, num_tokens: int) -> None:
        self.next_chunk = min(self.next_chunk, num_tokens // self._chunk)
        self.known_tail = self.known_tail if self.known_tail <= num_tokens else 0

    def _taken(self, names: ChunkNames, whole: int) -> ChunkNames:
        self.next_chunk = max(self.next_chunk, whole)
        if names.tail_tokens:
            self.known_tail = whole * self._chunk + names.tail_tokens
        return names
