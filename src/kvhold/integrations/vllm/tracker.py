"""One request as the connector follows it: what of its prompt is computed, and what of that is stored. No I/O, no vLLM.

    tracker.start(computed_tokens)      # it is scheduled for the first time, or again after a preemption
    tracker.advance(scheduled_tokens)   # a step will compute so many more
    names, blocks = tracker.take()      # what became whole and is to be stored, once

The tokens computed after a step are those it started with (hits, ours or the engine's own) and the sum of what was scheduled since.
"""

from dataclasses import dataclass

from kvhold.core.keys import ChunkNames, Prompt


@dataclass
class RequestTracker:
    """`start_tokens`: computed when it was (re)started; `num_scheduled_tokens`: scheduled since then; `next_chunk`: first chunk that is
    not known to be in the cache; `tail_known`: whether the prompt's tail is."""

    prompt: Prompt
    start_tokens: int = 0
    num_scheduled_tokens: int = 0
    next_chunk: int = 0
    tail_known: bool = False

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in blocks once the scheduled steps have run; never more than the prompt has, because later tokens may
        still be taken back (speculation)."""
        return min(len(self.prompt.tokens), self.start_tokens + self.num_scheduled_tokens)

    def found(self, hit_tokens: int) -> None:
        """The cache holds the first `hit_tokens` tokens: they need not be stored again."""
        self.next_chunk = hit_tokens // self.prompt.namespace.layout.tokens_per_chunk
        self.tail_known = bool(self.prompt.tail_lengths) and hit_tokens == self._tail_end

    def start(self, computed_tokens: int) -> None:
        """It runs, with so many tokens computed already. Fewer than the cache promised: the promise is void from there on."""
        self.start_tokens = computed_tokens
        self.num_scheduled_tokens = 0
        kept = computed_tokens + 1  # where a hit covers the whole prompt, its last token is computed again
        self.next_chunk = min(self.next_chunk, kept // self.prompt.namespace.layout.tokens_per_chunk)
        self.tail_known = self.tail_known and kept >= self._tail_end

    def advance(self, scheduled_tokens: int) -> None:
        """A step computes so many tokens more."""
        self.num_scheduled_tokens += scheduled_tokens

    def take(self) -> tuple[ChunkNames, range] | None:
        """Chunks that are whole now (and the tail, once the prompt is) and were not taken before, and which blocks hold them.

        The range counts the request's own blocks. None when there is nothing new.
        """
        layout = self.prompt.namespace.layout
        whole = self.computed_tokens // layout.tokens_per_chunk
        finished = self.computed_tokens == len(self.prompt.tokens)
        tail_tokens = self.prompt.tail_lengths[-1] if finished and self.prompt.tail_lengths and not self.tail_known else 0
        if whole <= self.next_chunk and not tail_tokens:
            return None
        first = self.next_chunk
        self.next_chunk = max(whole, first)
        self.tail_known = self.tail_known or bool(tail_tokens)
        names = self.prompt.chunks(first, last=whole, tail=bool(tail_tokens))
        per_chunk = layout.tokens_per_chunk // layout.tail_tokens
        return names, range(first * per_chunk, whole * per_chunk + tail_tokens // layout.tail_tokens)

    @property
    def _tail_end(self) -> int:
        """Tokens up to the end of the prompt's tail."""
        lengths = self.prompt.tail_lengths
        return self.prompt.num_whole * self.prompt.namespace.layout.tokens_per_chunk + (lengths[-1] if lengths else 0)
