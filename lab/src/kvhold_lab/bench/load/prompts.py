"""Made-up prompts, by a name and a number: token ids, or words of about a token."""

import math
import zlib
from typing import Protocol, TypeAlias

import numpy as np

from kvhold.core.errors import ConfigError

Content: TypeAlias = str | list[int]

# most vocabularies are larger, and begin with special tokens
FIRST_ID, VOCAB_SIZE = (256, 8_000)
_FEWEST_IDS = 2

_COMMON = """
the of and to in is that for it was on are as with his they at be this have from or had by hot
but some what there we can out other were all your when up use word how said each she which do
their time if will way about many then them would write like so these her long make thing see
him two has look more day could go come did my sound no most number who over know water than
call
"""
_WORDS = _COMMON.split()


class Prompts(Protocol):
    kind: str

    def piece(self, name: str, number: int, num_tokens: int) -> Content:
        """Return tokens or words; a shorter piece is a prefix of a longer one.

        Numbers, up to 63 bits, differ within the first tokens.
        """


class TokenPrompts:
    kind = "tokens"

    def __init__(
        self, seed: int = 0, *, first_id: int = FIRST_ID, vocab_size: int = VOCAB_SIZE
    ) -> None:
        if not 0 <= first_id <= vocab_size - _FEWEST_IDS:
            raise ConfigError(
                f"token ids from {first_id} up to {vocab_size} are too few; let the "
                "vocabulary be larger than the first id"
            )
        self._seed, self._first_id, self._num_ids = seed, first_id, vocab_size - first_id

    def piece(self, name: str, number: int, num_tokens: int) -> list[int]:
        return [
            self._first_id + choice
            for choice in _choices(self._seed, name, number, num_tokens, self._num_ids)
        ]


class TextPrompts:
    kind = "text"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def piece(self, name: str, number: int, num_tokens: int) -> str:
        return "".join(
            f" {_WORDS[choice]}"
            for choice in _choices(self._seed, name, number, num_tokens, len(_WORDS))
        )


def _choices(seed: int, name: str, number: int, count: int, base: int) -> list[int]:
    digits, rest = [], number
    for _ in range(math.ceil(63 / math.log2(base))):
        rest, digit = divmod(rest, base)
        digits.append(digit)
    if len(digits) >= count:
        return digits[:count]
    drawn = np.random.default_rng([seed, zlib.crc32(name.encode()), number]).integers(
        0, base, count - len(digits)
    )
    return digits + [int(choice) for choice in drawn]
