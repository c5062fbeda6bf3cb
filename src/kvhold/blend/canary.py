"""Some blended requests are also computed in full, sharing no KV. One thread.

if canary.is_due(permit):
    reason = canary.record(permit, drift_of(full_logits, blended_logits))
"""

import logging
import math
import random
from dataclasses import dataclass, field
from typing import Any

from kvhold.blend.permits import Permit, Permits
from kvhold.core.blend_config import BlendConfig

log = logging.getLogger(__name__)

_LEAST_BOUND = 0.02  # nats: a tenth of the probability at most (Pinsker)
_USUAL, _DRIFTED = 0.05, 0.5  # shares of requests beyond the bound
_BEYOND = math.log(_DRIFTED / _USUAL)
_WITHIN = math.log((1 - _DRIFTED) / (1 - _USUAL))
_MOST_SCORE = math.log(10_000)


@dataclass(frozen=True)
class Drift:
    """kl: KL(full || blended) of the next token, in nats
    agrees: on the likeliest token
    """

    kl: float
    agrees: bool


def drift_of(full: Any, blended: Any) -> Drift:
    """Logits [vocabulary], tensors of torch."""
    shares, others = (part.double().log_softmax(-1) for part in (full, blended))
    terms = shares.exp() * (shares - others)
    kl = float(terms.where(shares.exp() > 0, terms.new_zeros(())).sum())
    return Drift(max(kl, 0.0) if kl == kl else kl, bool(full.argmax() == blended.argmax()))


@dataclass
class _Watch:
    """strata: runs with one canary each; recent: KL since the score was 0"""

    choices: random.Random
    num_requests: int = 0
    strata: int = 0
    next_at: int = 0
    score: float = 0.0
    recent: list[float] = field(default_factory=list)


class Canary:
    """Withdraws permits whose requests drift.

    A CUSUM counts KL above `bound` and `kl_usual`: 50 % against 5 % of the requests. Outliers count
    once, four in a row withdraw, and a sound permit lasts 10,000 comparisons on average (Lorden,
    1971). Near ties change top-1 agreement, so it is only logged.
    """

    def __init__(
        self, permits: Permits, *, share: float = 0.01, bound: float | None = None, seed: int = 0
    ) -> None:
        """bound: in nats"""
        self._permits = permits
        self._share = share
        self._bound = _LEAST_BOUND if bound is None else bound
        self._seed = seed
        self._watches: dict[Permit, _Watch] = {}

    @classmethod
    def of(cls, config: BlendConfig, permits: Permits) -> "Canary":
        return cls(permits, share=config.canary_share, bound=config.max_kl)

    def is_due(self, permit: Permit) -> bool:
        """Count a request. The first is due, and all while the score is not 0."""
        if self._share <= 0:
            return False
        watch = self._watch(permit)
        number, watch.num_requests = watch.num_requests, watch.num_requests + 1
        is_chosen = number >= watch.next_at
        if is_chosen:
            watch.strata += 1
            place = (watch.strata + watch.choices.random()) / self._share
            watch.next_at = max(number + 1, math.floor(place))
        return is_chosen or watch.score > 0

    def record(self, permit: Permit, drift: Drift) -> str:
        """Return why the permit is withdrawn, if it is."""
        watch = self._watch(permit)
        bound = max(permit.kl_usual, self._bound)
        is_within = drift.kl <= bound  # NaN is not
        watch.score = max(0.0, watch.score + (_WITHIN if is_within else _BEYOND))
        watch.recent = [*watch.recent, drift.kl] if watch.score else []
        log.debug("kvhold: canary: %s, score %.2f", drift, watch.score)
        if watch.score < _MOST_SCORE:
            return ""
        beyond = sum(not kl <= bound for kl in watch.recent)
        reason = (
            f"{beyond} of {len(watch.recent)} canaries drifted by more than {bound:.3g} nats, the "
            f"last by {drift.kl:.3g}; was {permit.kl_usual:.3g} or less in 95 %"
        )
        self._permits.withdraw(permit, reason)
        del self._watches[permit]
        return reason

    def _watch(self, permit: Permit) -> _Watch:
        if permit not in self._watches:
            self._watches[permit] = _Watch(random.Random(self._seed))
        return self._watches[permit]
