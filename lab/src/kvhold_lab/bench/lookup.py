from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvhold.core.api import Hit
from kvhold.core.keys import HASH_BYTES, Namespace
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient
from kvhold_lab.bench.profiles import Profiles, of_both
from kvhold_lab.bench.rows import Row, in_turn, time_row
from kvhold_lab.bench.servers import running_node

LENGTHS = (32_000, 128_000)
ROUNDS = 25
LAYOUT = Layout(
    groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),), tokens_per_chunk=256
)
NAMESPACE = Namespace(model="bench", layout=LAYOUT)


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    measured = []
    for num_tokens in LENGTHS:
        tokens = np.random.default_rng(num_tokens).integers(0, 128_000, num_tokens, dtype=np.int32)
        row = _row(tokens)
        measured.append(profiles.of(row, partial(of_both, partial(_looking_up, tokens))))
    return measured


def _row(tokens: npt.NDArray[np.int32]) -> Row:
    hits: list[Hit] = []

    def unavoidable() -> None:
        client.ping()
        _hash_alone(tokens)

    with _holding(tokens) as client:
        work = {"kvhold": lambda: hits.append(_lookup(client, tokens)), "limit": unavoidable}
        seconds = in_turn(work, rounds=ROUNDS, after={"kvhold": lambda: hits.pop().close()})
    return time_row(
        f"lookup {len(tokens):,} tokens through the node", seconds["kvhold"], seconds["limit"]
    )


def _lookup(client: NodeClient, tokens: npt.NDArray[np.int32]) -> Hit:
    hit = client.lookup(NAMESPACE.prompt(tokens).query())
    assert hit.num_tokens == len(tokens)
    return hit


@contextmanager
def _holding(tokens: npt.NDArray[np.int32], under: Sequence[str] = ()) -> Iterator[NodeClient]:
    with running_node(under) as client:
        client.register(NAMESPACE)
        with client.reserve(LAYOUT, NAMESPACE.prompt(tokens).chunks()) as reservation:
            reservation.commit()
        yield client


@contextmanager
def _looking_up(
    tokens: npt.NDArray[np.int32], under: Sequence[str]
) -> Iterator[Callable[[], None]]:
    with _holding(tokens, under) as client:
        yield lambda: _lookup(client, tokens).close()


def _hash_alone(tokens: npt.NDArray[np.int32]) -> None:
    raw, step, parent = memoryview(tokens.tobytes()), 4 * LAYOUT.tokens_per_chunk, bytes(HASH_BYTES)
    for start in range(0, len(raw), step):
        state = blake2b(parent, digest_size=HASH_BYTES)
        state.update(raw[start : start + step])
        parent = state.digest()
