"""A *prompt* (`LearnedPolicy.looked_up`): pause and new chunks in one number (docs/eviction.md)."""

from kvhold.tiers.policies.ghosts import MOST_USES, Ghost, pack

USES, PAUSES, NEW = 7, 5, 5  # numbers of values
_PROMPTS = PAUSES * NEW


def prompt_of(pause: int, num_new: int) -> int:
    """pause: its class, 0 if no chunk is known; num_new: new chunks"""
    # 0, 1-3, 4-15, 16-63, 64 and more
    return pause * NEW + min((num_new.bit_length() + 1) // 2, NEW - 1)


def kind_of(uses: int, prompt: int) -> int:
    return (min(uses.bit_length(), USES) - 1) * _PROMPTS + prompt


# by earlier uses: the number to add to the packed past of a first use
_PAST_OF_NEXT_USE = [
    pack(Ghost(0.0, kind_of(uses, 0), uses)) for uses in (*range(1, MOST_USES + 1), MOST_USES)
]


def pasts_of_use(prompt: int, value: int, now_s: float) -> list[int]:
    """For chunks used now: `[number of earlier uses]`."""
    first = pack(Ghost(now_s, prompt, 0, value))
    return [first + more for more in _PAST_OF_NEXT_USE]
