from collections import OrderedDict

_MOST_SPACES = 256
_LEAST_TOKENS = 64  # fewer show a step's fixed cost
_MOST_TOKENS = 1 << 20  # then older ones count half


class ComputeSpeeds:
    """By namespace, as engines report them."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def measured(self, namespace: str, num_tokens: int, seconds: float) -> None:
        if num_tokens < _LEAST_TOKENS:
            return
        tokens, total_s = self._sums.pop(namespace, (0.0, 0.0))
        if tokens > _MOST_TOKENS:
            tokens, total_s = tokens / 2, total_s / 2
        self._sums[namespace] = tokens + num_tokens, total_s + seconds
        if len(self._sums) > _MOST_SPACES:
            self._sums.popitem(last=False)

    def token_s(self, namespace: str) -> float | None:
        """None: unknown."""
        sums = self._sums.get(namespace)
        return None if sums is None else sums[1] / sums[0]
