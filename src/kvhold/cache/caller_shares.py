from collections.abc import Iterator

from kvhold.cache.busiest import Busiest, Decay
from kvhold.core.usage import LookupShare

MOST_APART = 64


class _Counts:
    __slots__ = ("asked_tokens", "hit_tokens", "lookups")

    def __init__(self) -> None:
        self.lookups = self.asked_tokens = self.hit_tokens = 0

    def add(self, asked_tokens: int, hit_tokens: int) -> None:
        self.lookups += 1
        self.asked_tokens += asked_tokens
        self.hit_tokens += hit_tokens

    def share(self, kind: str, tenant: str, name: str) -> LookupShare:
        return LookupShare(kind, tenant, name, self.lookups, self.asked_tokens, self.hit_tokens)


class CallerShares:
    """Lookups by tenant, client and session."""

    def __init__(self, decay: Decay) -> None:
        self._all = _Counts()
        self._decay = decay
        self._tenants, self._clients, self._sessions = (
            Busiest[tuple[str, str], _Counts](MOST_APART, _Counts, decay) for _ in range(3)
        )

    def count(
        self, tenant: str, client: str, session: str, asked_tokens: int, hit_tokens: int
    ) -> None:
        """session: empty: none"""
        self._all.add(asked_tokens, hit_tokens)
        weight = (asked_tokens + 1) * self._decay.scale()
        self._tenants.use((tenant, tenant), weight).add(asked_tokens, hit_tokens)
        self._clients.use(("", client), weight).add(asked_tokens, hit_tokens)
        if session:
            self._sessions.use((tenant, session), weight).add(asked_tokens, hit_tokens)

    def rows(self) -> Iterator[LookupShare]:
        """All, then by kind, the busiest first."""
        yield self._all.share("all", "", "")
        for kind, busiest in (
            ("tenant", self._tenants),
            ("client", self._clients),
            ("session", self._sessions),
        ):
            for (tenant, name), counts in busiest.rows():
                yield counts.share(kind, tenant, name)
