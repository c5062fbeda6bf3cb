"""How long prompts are, where the caller does not say: as long as allows all visits to be done in
less than an hour on this machine.

    tokens, expected_s = fitting(longest_s(model, num_threads=2), planned, num_systems)

One engine is asked before the others start, because their memories are of so and so many prompts.
Cores with AVX-512 compute 1,100 tokens in half the time of those without.
"""

from collections.abc import Sequence

from kvhold.lab.bench.compare.systems import Sizes
from kvhold.lab.bench.compare.visits import Visit, work
from kvhold.lab.bench.engines import alike
from kvhold.lab.engines.engine import Engine, binding, options_for
from kvhold.lab.engines.models import ModelInfo
from kvhold.lab.engines.prompts import make_prompt

LENGTHS = (
    1_100,
    600,
)  # a quarter of each is a little more than a whole number of blocks, 128 tokens

_MOST_S = 45 * 60  # for visits; engines take minutes to start
_AROUND = (
    1.3  # what a visit takes, of what computing its prompts does: storing, resting, dropping pages
)
_SEEDS = range(999_990, 999_993)  # the first prompt warms the engine up


def fitting(longest_s: float, planned: Sequence[Visit], num_systems: int) -> tuple[int, float]:
    """The longest of LENGTHS with which all is done in time, or the shortest, and the seconds that
    takes.

    longest_s: for a prompt of the longest to be computed
    """
    of_longest_s = longest_s * work(planned) * num_systems * _AROUND
    expected_s = {tokens: of_longest_s * tokens / LENGTHS[0] for tokens in LENGTHS}
    return next(
        (one for one in expected_s.items() if one[1] <= _MOST_S),
        (LENGTHS[-1], expected_s[LENGTHS[-1]]),
    )


def longest_s(model: ModelInfo, *, num_threads: int) -> float:
    """How long an engine takes to compute a prompt of the longest. Raises EngineFailed."""
    sizes = Sizes(model, LENGTHS[0], prompts=1)
    given = {"kv_cache_bytes": sizes.own_bytes, "prefix_caching": False, **binding(num_threads)}
    options = options_for(model, max_model_len=sizes.longest, **given)
    with alike(), Engine(options) as engine:
        return min(
            engine.generate(make_prompt(model.path, LENGTHS[0], seed=seed), max_tokens=1).ttft_s
            for seed in _SEEDS
        )
