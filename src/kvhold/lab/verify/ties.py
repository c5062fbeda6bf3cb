"""Near ties: places where the engine itself, without a connector, might as well have chosen another
token.

    at_near_tie(answer, reference, choices, dtype="bfloat16")

What is computed together decides the last bits of a sum, and kvhold changes what is, as any hit
does. A logit is a number of the engine's type, whose neighbours are one unit in the last place
(ulp) away: in bfloat16, with 8 bits, 1/16 for logits from 8 to 16. Where each of the two best
logits comes out one step away from where it was, the distance between them changes by two; so a
lead of up to two steps may be gone. That is all that is granted. In float32 two steps are 2e-6 of
logits near 8, which is nothing.

Wrong KV cannot hide here. The witness compares every loaded block byte by byte, and where one is
wrong the path fails whatever the tokens are; and how near a tie is, is said by an engine that has
no KV of ours.
"""

import math
from collections.abc import Sequence

from kvhold.lab.verify.messages import Choice

_STEPS = 2  # by which two logits may move towards each other, one each
_FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


def at_near_tie(
    answer: Sequence[int], reference: Sequence[int], choices: Sequence[Choice], *, dtype: str
) -> bool:
    """Whether two answers of equal length are the same up to a near tie, where each goes on with
    one of the two best tokens.

    choices: of the reference's tokens; dtype: of the engine's logits, "float32", "float16" or
        "bfloat16"; others have no near ties
    """
    if len(answer) != len(reference) or len(choices) != len(reference):
        return False
    for token, expected, choice in zip(answer, reference, choices, strict=True):
        if token != expected:
            return choice.tokens == (expected, token) and is_near(*choice.logits, dtype=dtype)
    return False


def is_near(first: float, second: float, *, dtype: str) -> bool:
    """Whether rounding to `dtype` may have decided which of two logits is the larger one."""
    bits = _FRACTION_BITS.get(dtype)
    largest = max(abs(first), abs(second))
    if bits is None or not math.isfinite(largest):
        return False
    _, exponent = math.frexp(largest)
    return abs(first - second) <= _STEPS * 2.0 ** (exponent - 1 - bits)
