"""Near ties: where the engine itself might have chosen another token.

The batch decides the last bits of a sum. A logit's step is one unit in the last place: in bfloat16
1/16, for logits from 8 to 16.
"""

import math
from collections.abc import Sequence

from kvhold_lab.verify.messages import Choice

_STEPS = 2
_FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


def at_near_tie(
    answer: Sequence[int], reference: Sequence[int], choices: Sequence[Choice], *, dtype: str
) -> bool:
    """Whether the answers are equal up to a near tie of the reference.

    dtype: of the logits: "float32", "float16" or "bfloat16"; others have no near ties
    """
    if len(answer) != len(reference) or len(choices) != len(reference):
        return False
    for token, expected, choice in zip(answer, reference, choices, strict=True):
        if token != expected:
            return choice.tokens == (expected, token) and is_near(*choice.logits, dtype=dtype)
    return False


def is_near(first: float, second: float, *, dtype: str) -> bool:
    bits = _FRACTION_BITS.get(dtype)
    largest = max(abs(first), abs(second))
    if bits is None or not math.isfinite(largest):
        return False
    _, exponent = math.frexp(largest)
    return abs(first - second) <= _STEPS * 2.0 ** (exponent - 1 - bits)
