"""The default prompt length: all visits end within an hour."""

from collections.abc import Sequence

from kvhold_lab.bench.compare.systems import Sizes
from kvhold_lab.bench.compare.visits import Visit, work
from kvhold_lab.bench.engines import alike
from kvhold_lab.engines.engine import Engine, binding, options_for
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.prompts import make_prompt

LENGTHS = (1_100, 600)

_MOST_S = 45 * 60
_AROUND = 1.3  # time of a visit / time to compute its prompts
_SEEDS = range(999_990, 999_993)


def fitting(longest_s: float, planned: Sequence[Visit], num_systems: int) -> tuple[int, float]:
    of_longest_s = longest_s * work(planned) * num_systems * _AROUND
    expected_s = {tokens: of_longest_s * tokens / LENGTHS[0] for tokens in LENGTHS}
    return next(
        (one for one in expected_s.items() if one[1] <= _MOST_S),
        (LENGTHS[-1], expected_s[LENGTHS[-1]]),
    )


def longest_s(model: ModelInfo, *, num_threads: int) -> float:
    sizes = Sizes(model, LENGTHS[0], prompts=1, output_tokens=1)
    given = {"kv_cache_bytes": sizes.own_bytes, "prefix_caching": False, **binding(num_threads)}
    options = options_for(model, max_model_len=sizes.longest, **given)
    with alike(), Engine(options) as engine:
        return min(
            engine.generate(make_prompt(model.path, LENGTHS[0], seed=seed), max_tokens=1).ttft_s
            for seed in _SEEDS
        )
