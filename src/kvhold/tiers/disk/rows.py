"""One row per file, in arrays: about 100 bytes each, no objects.

With `first_past`, each row has a past (`tiers/policies/ghosts.py`), and each kind and value has a
list, the least recently used row first.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.disk.columns import Columns
from kvhold.tiers.policies.ghosts import queue_of

NONE, _REMOVED = -1, -2
_BLOCK = 512  # the unit of `st_blocks`
_TABLES = 1024
_SMALLEST = 16
_MOST_KEYS = 500
_MOST_TIMES = 50_000
_MOST_ORDERED = 500
_MIX = 0x9E3779B97F4A7C15


class Rows:
    """The number of a removed row is reused.

    changed: lists whose first row may have changed; the user empties this set
    """

    def __init__(self, first_past: int | None = None) -> None:
        """first_past: of rows that are added without one; None: rows have no past."""
        self.num = 0
        self.changed: set[int] = set()
        self._first_past = first_past
        self._first_list = 0 if first_past is None else queue_of(first_past)
        self._columns = Columns(
            "BqIqqiiQ"[: None if first_past is not None else -1],
            (KEY_BYTES, 8, 4, 8, 8, 4, 4, 8)[: None if first_past is not None else -1],
        )
        self._take_views()
        self._oldest: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._ordered_to = NONE
        self._free = array("i")
        self._tables = [_Table() for _ in range(_TABLES)]

    def find(self, key: bytes) -> int:
        number = _hash(key)
        table = self._tables[number % _TABLES].rows
        mask = len(table) - 1
        place = number // _TABLES & mask
        while (row := table[place]) != NONE:
            if row != _REMOVED and self.key(row) == key:
                return row
            place = (place + 1) & mask
        return NONE

    def add(
        self,
        key: bytes,
        *,
        nbytes: int,
        occupied_bytes: int,
        written_ns: int,
        used_ns: int,
        past: int | None = None,
        behind: int = NONE,
    ) -> int:
        """behind: insert the row just before this row instead of last

        Raises OSError: there is no memory for more rows.
        """
        number = _hash(key)
        table = self._tables[number % _TABLES]
        if 3 * (table.num_filled + 1) > 2 * len(table.rows):
            table.make_again(self._hashes_of)
        row = self._free.pop() if self._free else self._append()
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self._nbytes[row], self._blocks[row] = nbytes, -(-occupied_bytes // _BLOCK)
        self._written_ns[row], self._used_ns[row] = written_ns, used_ns
        if self._first_past is not None:
            self._pasts[row] = self._first_past if past is None else past
        table.add(row, number // _TABLES)
        self.num += 1
        in_list = self.list_of(row)
        newest = self._newest.get(in_list, NONE)
        self._link(row, newest if behind == NONE else self._before[behind], in_list)
        return row

    def remove(self, row: int) -> None:
        number = _hash(self.key(row))
        self._tables[number % _TABLES].remove(row, number // _TABLES)
        self._unlink(row)
        self._nbytes[row] = NONE
        self._free.append(row)
        self.num -= 1

    def touch(self, row: int, used_ns: int) -> None:
        self._used_ns[row] = used_ns
        self._unlink(row)
        number = self.list_of(row)
        self._link(row, self._newest.get(number, NONE), number)

    def past(self, row: int) -> int:
        return self._pasts[row]

    def set_past(self, row: int, past: int) -> None:
        self._unlink(row)
        self._pasts[row] = past
        number = queue_of(past)
        self._link(row, self._newest.get(number, NONE), number)

    def first(self, number: int) -> int:
        return self._oldest.get(number, NONE)

    def after(self, row: int) -> int:
        return self._after[row]

    def list_of(self, row: int) -> int:
        return 0 if self._first_past is None else queue_of(self._pasts[row])

    def lists(self) -> list[int]:
        return list(self._oldest)

    def oldest(self) -> Iterator[int]:
        """By list, the least recently used first. Do not change rows during this."""
        for first in self._oldest.values():
            row = first
            while row != NONE:
                yield row
                row = self._after[row]

    def newest(self) -> Iterator[int]:
        for last in self._newest.values():
            row = last
            while row != NONE:
                yield row
                row = self._before[row]

    def sort(self) -> None:
        sorting = Sorting(self)
        for _ in sorting.look():
            pass
        sorting.sort()
        for _ in sorting.link():
            pass

    def used_ns(self) -> "Iterator[np.ndarray[Any, Any]]":
        """In parts: int64 [rows], NONE where a row is free."""
        for begin in range(0, self._columns.num_items, _MOST_TIMES):
            end = min(begin + _MOST_TIMES, self._columns.num_items)
            used_ns = np.array(self._used_ns[begin:end], np.int64)
            used_ns[np.array(self._nbytes[begin:end], np.int64) == NONE] = NONE
            yield used_ns

    def begin_order(self) -> None:
        self._ordered_to = NONE

    def order_next(self, row: int, used_ns: int) -> None:
        """Put a row behind those of earlier calls, unless it was removed or used since `used_ns`.

        Rows with another past than `first_past` stay.
        """
        if self._nbytes[row] == NONE or self._used_ns[row] != used_ns:
            return
        if self.list_of(row) != self._first_list:
            return
        self._unlink(row)
        self._link(row, self._ordered_to, self._first_list)
        self._ordered_to = row

    def keys(self, prefix: bytes) -> Iterator[list[bytes]]:
        """Rows may change between the parts."""
        for begin in range(0, self._columns.num_items, _MOST_KEYS):
            rows = range(begin, min(begin + _MOST_KEYS, self._columns.num_items))
            keys = [self.key(row) for row in rows if self._nbytes[row] != NONE]
            yield [key for key in keys if key.startswith(prefix)]

    def key(self, row: int) -> bytes:
        return bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def nbytes(self, row: int) -> int:
        return self._nbytes[row]

    def occupied_bytes(self, row: int) -> int:
        return self._blocks[row] * _BLOCK

    def written_ns(self, row: int) -> int:
        return self._written_ns[row]

    @property
    def index_bytes(self) -> int:
        arrays = [self._free, *(table.rows for table in self._tables)]
        return self._columns.nbytes + sum(each.__sizeof__() for each in arrays)

    def _append(self) -> int:
        if self._columns.is_full:
            try:
                self._columns.grow()
            finally:
                self._take_views()
        return self._columns.append()

    def _take_views(self) -> None:
        (
            self._keys,
            self._nbytes,
            self._blocks,
            self._written_ns,
            self._used_ns,
            self._before,
            self._after,
            *pasts,
        ) = self._columns.views()
        if pasts:
            (self._pasts,) = pasts

    def _link(self, row: int, before: int, number: int) -> None:
        after = self._oldest.get(number, NONE) if before == NONE else self._after[before]
        self._before[row], self._after[row] = before, after
        if before == NONE:
            self._oldest[number] = row
            self.changed.add(number)
        else:
            self._after[before] = row
        if after == NONE:
            self._newest[number] = row
        else:
            self._before[after] = row

    def _unlink(self, row: int) -> None:
        before, after = self._before[row], self._after[row]
        if row == self._ordered_to:
            self._ordered_to = before
        if before != NONE and after != NONE:
            self._after[before], self._before[after] = after, before
            return
        number = self.list_of(row)
        if before == after:
            del self._oldest[number], self._newest[number]
        elif before == NONE:
            self._oldest[number], self._before[after] = after, NONE
        else:
            self._newest[number], self._after[before] = before, NONE
        if before == NONE:
            self.changed.add(number)

    def _hashes_of(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        used = self._keys[: self._columns.num_items * KEY_BYTES]
        keys = np.frombuffer(used, np.uint8).reshape(-1, KEY_BYTES)[rows]
        head, ends, space = (
            np.ascontiguousarray(keys[:, begin : begin + 8]).view("<u8").reshape(-1)
            for begin in (NAMESPACE_BYTES, KEY_BYTES - 8, 0)
        )
        return np.asarray(head ^ (ends * np.uint64(_MIX)) ^ space)


class Sorting:
    """By time of use, in steps (`look`, `sort`, `link`). Rows may change in between.

    `sort` may run in a thread. Rows used after `look` stay last. The victims of `lru` and `fifo`
    are right from the first step of `link` on, those of `mru` at its end.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._noted: list[np.ndarray[Any, Any]] = []
        self._order = self._used_ns = np.empty(0, np.int64)

    def look(self) -> Iterator[None]:
        for part in self._rows.used_ns():
            self._noted.append(part)
            yield

    def sort(self) -> None:
        used_ns = np.concatenate([self._used_ns, *self._noted])
        live = np.flatnonzero(used_ns != NONE)
        self._order = live[np.argsort(used_ns[live], kind="stable")]
        self._used_ns = used_ns[self._order]

    def link(self) -> Iterator[None]:
        self._rows.begin_order()
        for begin in range(0, len(self._order), _MOST_ORDERED):
            end = begin + _MOST_ORDERED
            for row, used_ns in zip(
                self._order[begin:end].tolist(), self._used_ns[begin:end].tolist(), strict=True
            ):
                self._rows.order_next(row, used_ns)
            yield


class _Table:
    __slots__ = ("num_filled", "rows")

    def __init__(self) -> None:
        self.rows = array("i", [NONE]) * _SMALLEST
        self.num_filled = 0

    def add(self, row: int, number: int) -> None:
        mask = len(self.rows) - 1
        place = number & mask
        while self.rows[place] >= 0:
            place = (place + 1) & mask
        self.num_filled += self.rows[place] == NONE
        self.rows[place] = row

    def remove(self, row: int, number: int) -> None:
        mask = len(self.rows) - 1
        place = number & mask
        while self.rows[place] != row:
            place = (place + 1) & mask
        self.rows[place] = _REMOVED

    def make_again(
        self, hashes_of: "Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]"
    ) -> None:
        rows = np.array(self.rows, np.int32)
        rows = rows[rows >= 0]
        size, self.num_filled = len(self.rows), len(rows)
        while 3 * len(rows) > size:
            size *= 2
        table = np.full(size, NONE, np.int32)
        places = (hashes_of(rows) // np.uint64(_TABLES) & np.uint64(size - 1)).astype(np.int64)
        while len(rows):
            free = table[places] == NONE
            table[places[free]] = rows[free]
            left = table[places] != rows
            rows, places = rows[left], (places[left] + 1) & (size - 1)
        self.rows = array("i", table.tobytes())


def _hash(key: bytes) -> int:
    head = int.from_bytes(key[NAMESPACE_BYTES : NAMESPACE_BYTES + 8], "little")
    ends = int.from_bytes(key[-8:], "little")
    return head ^ (ends * _MIX & 0xFFFFFFFFFFFFFFFF) ^ int.from_bytes(key[:8], "little")
