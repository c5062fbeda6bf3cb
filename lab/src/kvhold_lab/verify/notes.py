"""The notes of the witness, written by engine processes."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Self

FOLDER = "witness_folder"
_CONTENT_BYTES, _DIGEST_BYTES = 24, 16
_NAME_BYTES = 8
_RECORD_BYTES = _NAME_BYTES + _CONTENT_BYTES + _DIGEST_BYTES


@dataclass(frozen=True)
class Verdict:
    """unknown:  blocks never seen computed
    in_part:  loads that ended within a block, which cannot be compared
    """

    compared: int
    wrong: int
    unknown: int
    in_part: int

    @property
    def is_exact(self) -> bool:
        return self.compared > 0 and not (self.wrong or self.unknown or self.in_part)


class Notes:
    """If one worker's notes lack a name, the other engines' are read."""

    def __init__(self, folder: Path, *, worker: int) -> None:
        self._folder = folder
        self._worker = worker
        self._known: dict[bytes, set[bytes]] = {}
        self._read: dict[Path, int] = {}
        own = f"{os.getpid()}-{worker}-{token_hex(4)}"
        self._computed = (folder / f"computed-{own}").open("wb", buffering=0)
        self._verdict = (folder / f"verdict-{own}").open("w")

    def computed(self, group: int, content: bytes, digest: bytes) -> None:
        name = self._note_name(group, content)
        if digest not in self._known.setdefault(name, set()):
            self._known[name].add(digest)
            self._computed.write(name + digest)

    def knows(self, group: int, content: bytes) -> bool:
        name = self._note_name(group, content)
        if name not in self._known:
            self._read_others()
        return name in self._known

    def is_computed(self, group: int, content: bytes, digest: bytes) -> bool:
        """A repetition may compute other bytes."""
        name = self._note_name(group, content)
        if digest not in self._known.get(name, ()):
            self._read_others()
        return digest in self._known.get(name, ())

    def verdict(self, **load: Any) -> None:
        self._verdict.write(json.dumps(load) + "\n")
        self._verdict.flush()

    def close(self) -> None:
        self._computed.close()
        self._verdict.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _note_name(self, group: int, content: bytes) -> bytes:
        assert len(content) == _CONTENT_BYTES
        return self._worker.to_bytes(4, "big") + group.to_bytes(4, "big") + content

    def _read_others(self) -> None:
        for path in self._folder.glob(f"computed-*-{self._worker}-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = len(data) - len(data) % _RECORD_BYTES
            self._read[path] = self._read.get(path, 0) + whole
            for at in range(0, whole, _RECORD_BYTES):
                record = data[at : at + _RECORD_BYTES]
                self._known.setdefault(record[:-_DIGEST_BYTES], set()).add(record[-_DIGEST_BYTES:])


def read_verdict(folder: Path) -> Verdict:
    loads = list(read_loads(folder))
    return Verdict(
        compared=sum(load["compared"] for load in loads),
        wrong=sum(len(load["wrong"]) for load in loads),
        unknown=sum(len(load["unknown"]) for load in loads),
        in_part=sum(load["in_part"] for load in loads),
    )


def read_loads(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("verdict-*")):
        yield from (json.loads(line) for line in path.read_text().splitlines())
