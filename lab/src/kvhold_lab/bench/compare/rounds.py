"""The rounds of `kvhold bench vllm`.

The first round does not count.
"""

from collections.abc import Sequence

from kvhold_lab.bench.compare import names
from kvhold_lab.bench.compare.visits import BURST, WITHIN, ComparePlan, Visit, VisitStage

SHARES = (0, 25, 50, 75, 100)
HELD_PROMPTS = 48  # a round makes 32, or 44 with `unchecked`

_WORKLOAD = "working set of a round"
_KVHOLD = names.key(names.KVHOLD, "ram")
_EVERYONE = (names.RECOMPUTE, names.LIMIT, names.OFFLOADING, _KVHOLD)
_FEW = (names.PLAIN, names.AGAIN, _KVHOLD)
_UNCHECKED_CELLS = 12
_ANSWER_TOKENS = 8

_Cell = tuple[tuple[str, ...], bool]


def repeating(
    shares: Sequence[int] = SHARES,
    *,
    rounds: int,
    offloading: bool = True,
    layerwise: bool = False,
    unchecked: bool = False,
) -> ComparePlan:
    of_share = {share: _cells(share, layerwise=layerwise, unchecked=unchecked) for share in shares}
    stages = []
    for number in range(1 + rounds):
        what = f"round {number} of {rounds}" if number else "warming up"
        documents = 0
        for share, cells in of_share.items():
            visits = []
            for asked, burst in cells:
                size = BURST if burst else 1
                visits.append(
                    Visit(
                        share,
                        tuple(range(documents, documents + size)),
                        counts=number > 0,
                        asked=asked,
                        forgets=0 not in shares or not set(names.COPIES).isdisjoint(asked),
                    )
                )
                documents += size
            stages.append(VisitStage(_WORKLOAD, f"{what}, {share} % reuse", tuple(visits)))
    systems = (
        *(names.RECOMPUTE, names.PLAIN, names.AGAIN, names.LIMIT),
        *((names.OFFLOADING,) if offloading else ()),
        *(names.KVHOLD, names.LEFT_ALONE, names.LEFT_AGAIN),
        *((names.LAYERWISE, names.BESIDE) if layerwise else ()),
        *((names.UNCHECKED, names.CHECKED_AGAIN) if unchecked else ()),
    )
    return ComparePlan(
        "vllm",
        systems,
        tuple(stages),
        held_prompts=HELD_PROMPTS,
        output_tokens=_ANSWER_TOKENS,
        strict=True,
        settles=False,
    )


def _cells(reuse: int, *, layerwise: bool, unchecked: bool) -> list[_Cell]:
    if reuse == 0:
        cells = [
            ((*_FEW[:2], *_EVERYONE), False),
            ((*_FEW[:2], *_EVERYONE), True),
            *[(_FEW, burst) for burst in (False, True)] * 2,
            *[(WITHIN, burst) for burst in (False, False, True)] * 2,
        ]
    elif reuse == 100:
        cells = [
            ((names.PLAIN, *_EVERYONE), False),
            (_EVERYONE, True),
            *[((names.LIMIT, _KVHOLD), False)] * 3,
        ]
    else:
        cells = [(_EVERYONE, False), (_EVERYONE, True)]
    if layerwise:
        cells += [((names.BESIDE, names.LAYERWISE), False)] * 2
    if unchecked and reuse == 100:
        cells += [((_KVHOLD, names.UNCHECKED, names.CHECKED_AGAIN), False)] * _UNCHECKED_CELLS
    return cells
