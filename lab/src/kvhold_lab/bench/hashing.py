from hashlib import blake2b

import numpy as np

from kvhold.core.keys import HASH_BYTES, Namespace, Query
from kvhold.core.layout import Group, Layout
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, time_row

NUM_TOKENS = 128_000
ROUNDS = 25


def rows(profiles: Profiles | None = None) -> list[Row]:
    layout = Layout(groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),))
    namespace = Namespace(model="bench", layout=layout)
    tokens = np.random.default_rng(0).integers(0, 128_000, NUM_TOKENS, dtype=np.int32)
    raw = tokens.tobytes()

    def name() -> Query:
        return namespace.prompt(tokens).query()

    seconds = in_turn(
        {"kvhold": name, "blake2b": lambda: blake2b(raw, digest_size=HASH_BYTES).digest()},
        rounds=ROUNDS,
    )
    row = time_row(f"naming {NUM_TOKENS:,} tokens", seconds["kvhold"], seconds["blake2b"])
    return [(profiles or Profiles()).of(row, lambda: of_calls(name))]
