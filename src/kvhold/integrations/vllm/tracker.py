"""One request as the connector follows it: what of its text is computed, and what of that is stored. No I/O, no vLLM.

    tracker.start(computed_tokens)      # it is scheduled for the first time, or again after a preemption
    tracker.advance(scheduled_tokens)   # the step that was just planned will compute so many more
    tracker.take(request.all_token_ids) # names of what becomes whole in that step, once
    tracker.finish(request.all_token_ids, num_blocks)   # it has ended: what else is whole, and the tail

The tokens computed after a step are those it started with (hits, ours or the engine's own) and the sum of what was scheduled since. Of
them only those are named whose ids are certain. A prompt's are from the beginning. A generated token's is once it was sampled and
accepted, that is, once it is in `all_token_ids`: never while it is a draft, or a placeholder for what a pass under way will sample. So
what is stored with a step is the KV of the first min(computed, known) tokens, and all of that is final when the step's pass has run:

- One pass at a time: the token sampled last is known, and its KV is computed in the step that is planned now.
- Passes under way (asynchronous scheduling): fewer are known than will be computed. The last one known was sampled by a pass that is over;
  its KV is computed in the next pass of this request, which is under way or planned now.
- Drafts: some of those scheduled are taken back, and the sum is too large until `advance` is told the engine's own count. That does no
  harm: while a prompt is computed there are no drafts and the sum is exact; after that each pass begins with the last token that the pass
  before it has sampled, so that everything known is computed, and known is the smaller number.

When a request ends, no pass of its own is to come: the KV of its last token is not computed, and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.core.keys import ChunkNames, GrowingPrompt, Prompt


@dataclass
class RequestTracker:
    """prompt: what of the request's prompt may be stored: all of it, or all but its last `skip_last_n_tokens` (`Prompt.until`); with
    save_decode, where the request comes back from a preemption, what it had generated belongs to it
    save_decode: what is generated is stored, too
    store_tails: the blocks after the last whole chunk are stored when the prompt is computed, and with save_decode when the request ends
    skip_last_n_tokens: with save_decode, the last tokens of the text as far as it is known are not stored either
    start_tokens, num_scheduled_tokens: computed when it was (re)started, scheduled since then
    taken_back_tokens: of them, those that the engine does not count any more
    next_chunk: the first chunk that is not known to be in the cache
    known_tail: where the tail ends that is known to be in the cache, in tokens; 0: none
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
    _text: GrowingPrompt | None = None  # the prompt and the rest as far as it was named: to a chunk's end, until the request ends

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt whose KV is in blocks once the scheduled steps have run."""
        return min(self.prompt.num_tokens, self._counted)

    def found(self, hit_tokens: int) -> None:
        """The cache holds the first `hit_tokens` tokens: they need not be stored again."""
        self.next_chunk, tail = divmod(hit_tokens, self._chunk)
        self.known_tail = hit_tokens if tail else 0

    def start(self, computed_tokens: int) -> None:
        """It runs, with so many tokens computed already. Fewer than the cache promised: the promise is void from there on."""
        self.start_tokens = computed_tokens
        self.num_scheduled_tokens = self.taken_back_tokens = 0
        self._keep(computed_tokens + 1)  # where a hit covers all there is, its last token is computed again

    def advance(self, scheduled_tokens: int, computed_tokens: int | None = None) -> None:
        """A step computes so many tokens more, drafts and placeholders among them.

        computed_tokens: how many the engine counts as computed before that step, where it says so. Fewer than are counted here: drafts
        were rejected, or a load that was under way beside a pass has failed, and what was stored from there on is void.
        """
        if computed_tokens is not None and computed_tokens < self._counted:
            self.taken_back_tokens += self._counted - computed_tokens
            self._keep(computed_tokens)
        self.num_scheduled_tokens += scheduled_tokens

    def take(self, token_ids: Sequence[int] = ()) -> ChunkNames | None:
        """Chunks that are whole when the last step has run (and the prompt's tail, once the prompt is) and were not taken before.
        To be gathered after that step's pass and before the request's next one.

        token_ids: with save_decode, all the request's tokens that are certain now: prompt, and what was sampled and accepted

        None when there is nothing new.
        """
        return self._take(self._end(len(token_ids)), token_ids)

    def _take(self, end: int, token_ids: Sequence[int]) -> ChunkNames | None:
        """What is whole of the first `end` tokens and was not taken before."""
        whole, first = end // self._chunk, self.next_chunk
        tail_tokens = self._prompt_tail if end >= self.prompt.num_tokens and first <= whole == self.prompt.num_whole else 0
        if whole <= first and not tail_tokens:
            return None
        if whole <= self.prompt.num_whole:
            names = self.prompt.chunks(first, last=whole, tail=bool(tail_tokens))
        else:
            names = self._grown(token_ids, whole * self._chunk).chunks(first, last=whole, tail=False)
        return self._taken(names, whole)

    def finish(self, token_ids: Sequence[int], num_blocks: int) -> ChunkNames | None:
        """What has become whole since the last `take`, and with save_decode the tail of what was generated. The request has ended.

        token_ids:  all its tokens that are certain, the one sampled last among them
        num_blocks: how many blocks it still has; none, if it ended while it was preempted

        To be gathered after the passes that were under way, and before its blocks are anybody else's.
        """
        end = min(self._end(len(token_ids)), len(token_ids) - 1, num_blocks * self._block)
        if end <= self.prompt.num_tokens:
            return self._take(end, token_ids)  # nothing, unless it was not known in time what the cache has
        whole, first = end // self._chunk, self.next_chunk
        if whole < first:
            return None
        text = self._grown(token_ids, end)
        lengths = text.tail_lengths if self.store_tails else ()  # none, where a chunk beyond the end was named before a preemption
        tail = bool(lengths) and self.known_tail < whole * self._chunk + lengths[-1]
        if whole == first and not tail:
            return None
        return self._taken(text.chunks(first, last=whole, tail=tail), whole)

    @property
    def _chunk(self) -> int:
        return self.prompt.namespace.layout.tokens_per_chunk

    @property
    def _block(self) -> int:
        """Tokens in a block; in a chunk, where there are no tails."""
        return self.prompt.namespace.layout.tail_tokens or self._chunk

    @property
    def _counted(self) -> int:
        return self.start_tokens + self.num_scheduled_tokens - self.taken_back_tokens

    def _end(self, num_known: int) -> int:
        """How many tokens, from the first on, are certain and computed once the scheduled steps have run."""
        known = num_known - self.skip_last_n_tokens if self.save_decode else 0
        return min(max(self.prompt.num_tokens, known), self._counted)

    @property
    def _prompt_tail(self) -> int:
        """Tokens in the prompt's tail, if it is to be stored and not known to be."""
        lengths = self.prompt.tail_lengths if self.store_tails else ()
        end = self.prompt.num_whole * self._chunk + (lengths[-1] if lengths else 0)
        return lengths[-1] if lengths and self.known_tail < end else 0

    def _grown(self, token_ids: Sequence[int], end: int) -> GrowingPrompt:
        """The text, named up to `end` tokens, or as far as it was before a preemption."""
        text = self._text = self._text or self.prompt.growing()
        if text.num_tokens < end:
            text.append(token_ids[text.num_tokens : end])
        return text

    def _keep(self, num_tokens: int) -> None:
        """Nothing beyond so many tokens is known to be in the cache."""
        self.next_chunk = min(self.next_chunk, num_tokens // self._chunk)
        self.known_tail = self.known_tail if self.known_tail <= num_tokens else 0

    def _taken(self, names: ChunkNames, whole: int) -> ChunkNames:
        self.next_chunk = max(self.next_chunk, whole)
        if names.tail_tokens:
            self.known_tail = whole * self._chunk + names.tail_tokens
        return names
