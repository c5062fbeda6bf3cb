import os

from xxhash import xxh3_64_intdigest

from kvhold.codecs.chunk import Frame, frame_chunk
from kvhold.codecs.frame import check_identity, read_header, verify
from kvhold.codecs.raw import Raw
from kvhold.core.keys import HASH_BYTES, Namespace, make_key
from kvhold.core.layout import Group, Layout
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, rate_row

GROUP = Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16")
NUM_CHUNKS = 4
ROUNDS = 15


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    chunks = _Chunks()
    work = {"framing": chunks.frame, "checking": chunks.check, "xxh3": chunks.hash}
    seconds = in_turn(work, rounds=ROUNDS)
    return [
        profiles.of(
            rate_row("framing, raw", chunks.nbytes, seconds["framing"], seconds["xxh3"]),
            lambda: of_calls(chunks.frame),
        ),
        profiles.of(
            rate_row("checking a frame, raw", chunks.nbytes, seconds["checking"], seconds["xxh3"]),
            lambda: of_calls(chunks.check),
        ),
    ]


class _Chunks:
    def __init__(self) -> None:
        self._layout = Layout(groups=(GROUP,))
        self._num_tokens = self._layout.tokens_per_chunk
        chunk_bytes = self._layout.chunk_bytes(0, self._num_tokens)
        self.nbytes = NUM_CHUNKS * chunk_bytes
        namespace = Namespace(model="bench", layout=self._layout)
        self._keys = [
            make_key(namespace.digest, os.urandom(HASH_BYTES), 0, 0) for _ in range(NUM_CHUNKS)
        ]
        self._chunks = [memoryview(os.urandom(chunk_bytes)) for _ in range(NUM_CHUNKS)]
        self._frames = self.frame()

    def frame(self) -> list[Frame]:
        pairs = zip(self._keys, self._chunks, strict=True)
        return [
            frame_chunk(
                chunk,
                Raw(),
                key=key,
                layout=self._layout,
                num_tokens=self._num_tokens,
                first_token=0,
            )
            for key, chunk in pairs
        ]

    def check(self) -> None:
        for key, frame in zip(self._keys, self._frames, strict=True):
            header = read_header(frame.header, frame_bytes=frame.nbytes)
            check_identity(header, key=key, layout=self._layout, num_tokens=self._num_tokens)
            verify(header, frame.payload)

    def hash(self) -> None:
        for chunk in self._chunks:
            xxh3_64_intdigest(chunk)
