"""A file with the tags of namespaces: disks keep their chunks after a restart.

The first line has its start time and the number of forgotten namespaces; each other one a namespace
and its tags' digests, in hex. A line is written before the namespace's chunks.
"""

import logging
import os
import time
from pathlib import Path

from kvhold.cache.index.namespace_tags import MOST_KNOWN, KnownTags
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.tags import TAG_BYTES
from kvhold.tiers.files.safe import open_folder, open_own_file, replace_own_file

log = logging.getLogger(__name__)

_TITLE = "kvhold-tags-1"
_END = "."  # shows that a line was not cut
_MOST_LINES = 2 * MOST_KNOWN


class TagsFile:
    """One thread at a time."""

    def __init__(self, path: Path, *, any_owner: bool = False) -> None:
        self._path = path
        self._any_owner = any_owner
        self._num_lines, self._is_cut = 0, False

    def read(self) -> KnownTags:
        """Begin a file if there is none. Raises ConfigError: another user's, or unreadable."""
        try:
            known = self._read()
            if self._is_cut or self._num_lines > len(known.tags) + 1:
                self._write(known)
        except OSError as error:
            raise ConfigError(f"{self._path}: the tags cannot be read: {error}") from None
        return known

    def add(self, namespace: bytes, tags: bytes) -> None:
        """A fault is only logged."""
        try:
            if self._num_lines >= _MOST_LINES:
                self._write(self._read())
            file = self._open(self._path.name, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(file, "wb") as opened:
                opened.write(_line(namespace, tags).encode())
            self._num_lines += 1
        except OSError as error:
            log.error(
                "%s: a clear by tag may miss namespaces after a restart: %s", self._path, error
            )

    def _read(self) -> KnownTags:
        try:
            with os.fdopen(self._open(self._path.name, os.O_RDONLY), "rb") as opened:
                text = opened.read().decode(errors="replace")
        except FileNotFoundError:
            text = ""
        lines = text.split("\n")
        # a cut line stays as the last one
        lines = lines if lines[-1] else lines[:-1]
        since_s, forgotten = _head(lines[0]) if lines else (time.time(), 0)
        if not lines:
            self._write(KnownTags({}, since_s))
        self._num_lines = max(1, len(lines))
        self._is_cut = not text.startswith(_TITLE) or not text.endswith("\n")
        known: dict[bytes, bytes] = {}
        for line in lines[1:]:
            if (of_line := _read_line(line)) is None:
                forgotten += 1
            else:
                known.pop(of_line[0], None)
                known[of_line[0]] = of_line[1]
        too_many = max(0, len(known) - MOST_KNOWN)
        for namespace in list(known)[:too_many]:
            del known[namespace]
        return KnownTags(known, since_s, forgotten + too_many)

    def _write(self, known: KnownTags) -> None:
        lines = [f"{_TITLE}\t{known.since_s!r}\t{known.forgotten}\n".encode()]
        lines += [_line(namespace, tags).encode() for namespace, tags in known.tags.items()]
        replace_own_file(self._path, lines, any_owner=self._any_owner)
        self._num_lines = 1 + len(known.tags)

    def _open(self, name: str, flags: int) -> int:
        folder = open_folder(self._path.parent, any_owner=self._any_owner)
        try:
            return open_own_file(name, flags, dir_fd=folder, shown=str(self._path))
        finally:
            os.close(folder)


def _line(namespace: bytes, tags: bytes) -> str:
    return f"{namespace.hex()}\t{tags.hex()}\t{_END}\n"


def _read_line(line: str) -> tuple[bytes, bytes] | None:
    try:
        first, second, end = line.split("\t")
        namespace, tags = bytes.fromhex(first), bytes.fromhex(second)
    except ValueError:
        return None
    is_whole = len(namespace) == NAMESPACE_BYTES and len(tags) % TAG_BYTES == 0 and end == _END
    return (namespace, tags) if is_whole else None


def _head(line: str) -> tuple[float, int]:
    """A damaged file counts from now on."""
    try:
        title, since_s, forgotten = line.split("\t")
        if title == _TITLE:
            return float(since_s), int(forgotten)
    except ValueError:
        pass
    return time.time(), 1
