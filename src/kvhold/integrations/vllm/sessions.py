"""The latest turns of sessions, and those they supersede (docs/hints.md). No I/O, one thread."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec.structs import replace

from kvhold.core.api import RetainedPrompt
from kvhold.core.keys import HASH_BYTES, Query, split_hashes

_MOST_SESSIONS = 4096
_MOST_BRANCHES = 4  # per session; the oldest is forgotten
_MOST_CHUNKS = 1 << 20  # 16 MB of hashes
_MOST_RETAINS = 64  # of a session's forgotten branches; earlier ones end by their time

SessionKey = tuple[bytes, str]
"""Namespace and session_id: no tenant can name another's session."""


@dataclass(eq=False)
class SessionTurn:
    """retains: that end with the turn"""

    query: Query
    retains: list[RetainedPrompt] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        return len(self.query.hashes) // HASH_BYTES


@dataclass(frozen=True)
class Superseded:
    """Needed only by an older turn.

    query, first_chunk: its chunks from this one on, and its tails
    """

    query: Query
    first_chunk: int
    retains: list[RetainedPrompt]

    @property
    def has_chunks(self) -> bool:
        return self.first_chunk * HASH_BYTES < len(self.query.hashes) or bool(
            self.query.tail_lengths
        )


@dataclass(eq=False)
class _Session:
    """turns:   the latest of each branch, the oldest first
    retains: of forgotten branches
    """

    turns: list[SessionTurn] = field(default_factory=list)
    retains: list[RetainedPrompt] = field(default_factory=list)


class Sessions:
    def __init__(self) -> None:
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._num_chunks = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, session_id: str, query: Query) -> tuple[SessionTurn, Superseded | None]:
        """None: it continues no other turn."""
        session = self._sessions.setdefault((query.namespace, session_id), _Session())
        self._sessions.move_to_end((query.namespace, session_id))
        turns = session.turns
        superseded = None
        for older, shared in _by_shared_chunks(turns, query):
            if older.num_chunks and 2 * shared >= older.num_chunks:
                self._forget(turns, older)
                superseded = Superseded(_without_tails_of(query, older), shared, older.retains)
            break
        while len(turns) >= _MOST_BRANCHES:
            session.retains = [*session.retains, *turns[0].retains][-_MOST_RETAINS:]
            self._forget(turns, turns[0])
        turn = SessionTurn(query)
        turns.append(turn)
        self._num_chunks += turn.num_chunks
        self._bound()
        return turn, superseded

    def extend(self, session_id: str, turn: SessionTurn, query: Query) -> None:
        """If the turn is still known."""
        session = self._sessions.get((query.namespace, session_id))
        if session is not None and turn in session.turns:
            self._num_chunks -= turn.num_chunks
            turn.query = query
            self._num_chunks += turn.num_chunks

    def latest(self, session_id: str, namespace: bytes) -> list[Query]:
        """Of each branch, the newest first."""
        session = self._sessions.get((namespace, session_id), _Session())
        return [turn.query for turn in reversed(session.turns)]

    def end(self, session_id: str, namespace: bytes) -> list[RetainedPrompt]:
        """Return its retains."""
        session = self._sessions.pop((namespace, session_id), _Session())
        self._num_chunks -= sum(turn.num_chunks for turn in session.turns)
        of_turns = [retained for turn in session.turns for retained in turn.retains]
        return session.retains + of_turns

    def _forget(self, turns: list[SessionTurn], turn: SessionTurn) -> None:
        turns.remove(turn)
        self._num_chunks -= turn.num_chunks

    def _bound(self) -> None:
        """Forget the sessions whose latest turn is oldest. Their retains end by their time."""
        while len(self._sessions) > 1 and (
            len(self._sessions) > _MOST_SESSIONS or self._num_chunks > _MOST_CHUNKS
        ):
            _, session = self._sessions.popitem(last=False)
            self._num_chunks -= sum(turn.num_chunks for turn in session.turns)


def _by_shared_chunks(turns: list[SessionTurn], query: Query) -> Iterator[tuple[SessionTurn, int]]:
    """The most shared first, then the newest."""
    hashes = list(split_hashes(query.hashes))
    found = [(turn, _num_shared(turn, hashes)) for turn in reversed(turns)]
    yield from sorted(found, key=lambda one: -one[1])


def _num_shared(turn: SessionTurn, hashes: list[bytes]) -> int:
    pairs = zip(split_hashes(turn.query.hashes), hashes, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _without_tails_of(query: Query, older: SessionTurn) -> Query:
    mine = set(split_hashes(query.tail_hashes))
    tails = zip(older.query.tail_lengths, split_hashes(older.query.tail_hashes), strict=True)
    left = [(length, name) for length, name in tails if name not in mine]
    return replace(
        older.query,
        tail_hashes=b"".join(name for _, name in left),
        tail_lengths=tuple(length for length, _ in left),
    )
