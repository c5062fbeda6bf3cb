"""Compiled models of the policies, with `arc` (Megiddo and Modha, FAST 2003) and `belady`, the
optimum.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold_lab.simulate.policy_replay import Replayed
from kvhold_lab.simulate.trace import Ids, Starts

POLICIES = {"lru": 0, "lfu": 1, "fifo": 2, "mru": 3, "s3fifo": 4, "arc": 5, "belady": 6}


def replay(
    chunks: Ids,
    starts: Starts,
    parents: Ids,
    *,
    policy: str,
    capacity: int,
    lower_capacity: int = 0,
    num_victims: int = 0,
) -> Replayed:
    assert policy in POLICIES and capacity >= 0 and lower_capacity >= 0
    assert chunks.dtype == np.int32 and parents.dtype == np.int32 and starts.dtype == np.int64
    assert (
        starts.size >= 1
        and starts[0] == 0
        and starts[-1] == chunks.size
        and bool(np.all(np.diff(starts) >= 0))
    )
    assert chunks.size == 0 or 0 <= int(chunks.min()) <= int(chunks.max()) < parents.size
    assert parents.size == 0 or -1 <= int(parents.min()) <= int(parents.max()) < parents.size
    assert policy != "belady" or not lower_capacity, (
        "belady has one tier: the bound of two tiers is that of one tier of their total size"
    )
    found = np.zeros((starts.size - 1, 2), np.int32)
    totals = np.zeros(_TOTALS, np.int64)
    victims = np.empty(num_victims, np.int32)
    if policy == "belady":
        _belady(chunks, starts, parents, capacity, found, totals)
    else:
        _replay(
            chunks,
            starts,
            parents,
            POLICIES[policy],
            capacity,
            lower_capacity,
            found,
            totals,
            victims,
        )
    stored, promoted, written, evicted, below = (int(total) for total in totals)
    return Replayed(
        found, stored, promoted, written, evicted, below, victims[: min(num_victims, evicted)]
    )


_STORED, _PROMOTED, _WRITTEN, _EVICTED, _EVICTED_BELOW, _TOTALS = range(6)
_LRU, _LFU, _FIFO, _MRU, _S3FIFO, _ARC = range(6)

_ABSENT, _RESERVED, _HERE, _MISSING = 0, 1, 2, 3  # missing: to be written below
_SMALL, _MAIN = 0, 1  # S3-FIFO's queues; in ARC: used once, used more often
_SMALL_SHARE = 0.1
_MOST_FREQUENT = 3
_NEVER = 1 << 62
_NOWHERE = -(1 << 63)
_USES_SHIFT = 40
_NOBODY, _NO_ROOM = -1, -2

# Columns of `nodes`, a row per chunk:
#   PLACED: rank of its newest heap entry; valid if the chunk is a leaf of that rank
#   KIDS: number of continuations that are here or being written
#   GHOST: 1 + the queue that remembers its eviction, or 0; OLDER, NEWER: neighbours in that queue
_STATE, _RANK, _PLACED, _KIDS, _PARENT, _QUEUE, _USES, _GHOST, _OLDER, _NEWER, _COLUMNS = range(11)

_CLOCK, _USED, _SIZE, _HEAP, _GHOSTS, _OLDEST, _NEWEST, _PASSED, _HOLE, _TARGET, _NUMBERS = (
    0,
    1,
    2,
    4,
    6,
    8,
    10,
    12,
    14,
    16,
    17,
)


class _Place(NamedTuple):
    nodes: Any
    heaps: Any
    passed: Any
    numbers: Any


@njit
def _new_place(parents: Any, capacity: int) -> Any:
    nodes = np.zeros((parents.size, _COLUMNS), np.int64)
    nodes[:, _PLACED] = _NOWHERE
    nodes[:, _PARENT] = parents
    numbers = np.zeros(_NUMBERS, np.int64)
    numbers[_OLDEST : _NEWEST + 2] = _NOBODY
    room = 2 * min(parents.size, capacity) + 64
    return _Place(nodes, np.empty((2, room, 2), np.int64), np.empty((2, room), np.int64), numbers)


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(address), emit


@njit
def _lent(place: Any) -> Any:
    """Reference counts took over half of the time."""
    return _Place(
        carray(_pointer(place.nodes.ctypes.data), place.nodes.shape),
        carray(_pointer(place.heaps.ctypes.data), place.heaps.shape),
        carray(_pointer(place.passed.ctypes.data), place.passed.shape),
        carray(_pointer(place.numbers.ctypes.data), place.numbers.shape),
    )


@njit
def _is_leaf(place: Any, chunk: int, rank: int) -> Any:
    nodes = place.nodes
    return (
        nodes[chunk, _RANK] == rank and nodes[chunk, _KIDS] == 0 and nodes[chunk, _STATE] == _HERE
    )


@njit
def _sink(place: Any, queue: int, end: int, at: int, rank: int, chunk: int) -> None:
    heaps = place.heaps
    while True:
        child = 2 * at + 1
        if child >= end:
            break
        if child + 1 < end and heaps[queue, child + 1, 0] < heaps[queue, child, 0]:
            child += 1
        if rank <= heaps[queue, child, 0]:
            break
        heaps[queue, at, 0], heaps[queue, at, 1] = heaps[queue, child, 0], heaps[queue, child, 1]
        at = child
    heaps[queue, at, 0], heaps[queue, at, 1] = rank, chunk


@njit
def _sweep(place: Any, queue: int) -> None:
    heaps, nodes, numbers, kept = place.heaps, place.nodes, place.numbers, 0
    for i in range(numbers[_HOLE + queue], numbers[_HEAP + queue]):
        rank, chunk = heaps[queue, i, 0], heaps[queue, i, 1]
        if _is_leaf(place, chunk, rank):
            heaps[queue, kept, 0], heaps[queue, kept, 1] = rank, chunk
            kept += 1
        elif nodes[chunk, _PLACED] == rank:
            nodes[chunk, _PLACED] = _NOWHERE
    for at in range(kept // 2 - 1, -1, -1):
        _sink(place, queue, kept, at, heaps[queue, at, 0], heaps[queue, at, 1])
    numbers[_HOLE + queue], numbers[_HEAP + queue] = 0, kept


@njit
def _push(place: Any, chunk: int) -> None:
    nodes, heaps, numbers = place.nodes, place.heaps, place.numbers
    rank, queue = nodes[chunk, _RANK], nodes[chunk, _QUEUE]
    if nodes[chunk, _PLACED] == rank:
        return
    nodes[chunk, _PLACED] = rank
    if numbers[_HOLE + queue]:
        numbers[_HOLE + queue] = 0
        _sink(place, queue, numbers[_HEAP + queue], 0, rank, chunk)
        return
    if numbers[_HEAP + queue] == heaps.shape[1]:
        _sweep(place, queue)
    at = numbers[_HEAP + queue]
    numbers[_HEAP + queue] += 1
    while at > 0:
        above = (at - 1) >> 1
        if heaps[queue, above, 0] <= rank:
            break
        heaps[queue, at, 0], heaps[queue, at, 1] = heaps[queue, above, 0], heaps[queue, above, 1]
        at = above
    heaps[queue, at, 0], heaps[queue, at, 1] = rank, chunk


@njit
def _pop(place: Any, queue: int) -> Any:
    nodes, heaps, numbers = place.nodes, place.heaps, place.numbers
    while numbers[_HEAP + queue] > numbers[_HOLE + queue]:
        if numbers[_HOLE + queue]:
            end = numbers[_HEAP + queue] - 1
            numbers[_HEAP + queue] = end
            _sink(place, queue, end, 0, heaps[queue, end, 0], heaps[queue, end, 1])
        numbers[_HOLE + queue] = 1
        rank, chunk = heaps[queue, 0, 0], heaps[queue, 0, 1]
        if nodes[chunk, _PLACED] == rank:
            nodes[chunk, _PLACED] = _NOWHERE
        if _is_leaf(place, chunk, rank):
            return chunk
    return np.int64(_NOBODY)


@njit
def _set_rank(place: Any, chunk: int, rank: int) -> None:
    place.nodes[chunk, _RANK] = rank
    if place.nodes[chunk, _KIDS] == 0:
        _push(place, chunk)


@njit
def _now(place: Any) -> Any:
    place.numbers[_CLOCK] += 1
    return place.numbers[_CLOCK]


@njit
def _move(place: Any, chunk: int, queue: int) -> None:
    place.numbers[_SIZE + place.nodes[chunk, _QUEUE]] -= 1
    place.numbers[_SIZE + queue] += 1
    place.nodes[chunk, _QUEUE] = queue
    _set_rank(place, chunk, _now(place))


@njit
def _touch(place: Any, policy: int, chunk: int) -> None:
    if policy == _LRU:
        _set_rank(place, chunk, _now(place))
    elif policy == _LFU:
        place.nodes[chunk, _USES] += 1
        _set_rank(place, chunk, (place.nodes[chunk, _USES] << _USES_SHIFT) + _now(place))
    elif policy == _MRU:
        _set_rank(place, chunk, -_now(place))
    elif policy == _S3FIFO:
        place.nodes[chunk, _USES] = min(_MOST_FREQUENT, place.nodes[chunk, _USES] + 1)
    elif policy == _ARC:
        _move(place, chunk, _MAIN)


@njit
def _remember(place: Any, chunk: int, queue: int) -> None:
    newest = place.numbers[_NEWEST + queue]
    place.nodes[chunk, _GHOST], place.nodes[chunk, _OLDER], place.nodes[chunk, _NEWER] = (
        1 + queue,
        newest,
        _NOBODY,
    )
    if newest >= 0:
        place.nodes[newest, _NEWER] = chunk
    else:
        place.numbers[_OLDEST + queue] = chunk
    place.numbers[_NEWEST + queue] = chunk
    place.numbers[_GHOSTS + queue] += 1


@njit
def _forget(place: Any, chunk: int) -> None:
    queue, older, newer = (
        place.nodes[chunk, _GHOST] - 1,
        place.nodes[chunk, _OLDER],
        place.nodes[chunk, _NEWER],
    )
    if older >= 0:
        place.nodes[older, _NEWER] = newer
    else:
        place.numbers[_OLDEST + queue] = newer
    if newer >= 0:
        place.nodes[newer, _OLDER] = older
    else:
        place.numbers[_NEWEST + queue] = older
    place.nodes[chunk, _GHOST] = 0
    place.numbers[_GHOSTS + queue] -= 1


@njit
def _keep_ghosts(place: Any, queue: int, most: int) -> None:
    while place.numbers[_GHOSTS + queue] > most:
        _forget(place, place.numbers[_OLDEST + queue])


@njit
def _cold(place: Any, queue: int) -> Any:
    while True:
        chunk = _pop(place, queue)
        if chunk < 0 or place.nodes[chunk, _USES] == 0:
            return chunk
        place.passed[queue, place.numbers[_PASSED + queue]] = chunk
        place.numbers[_PASSED + queue] += 1


@njit
def _choose_s3fifo(place: Any) -> Any:
    numbers, passed = place.numbers, place.passed
    numbers[_PASSED] = numbers[_PASSED + 1] = 0
    first = (
        _SMALL if numbers[_SIZE] > _SMALL_SHARE * (numbers[_SIZE] + numbers[_SIZE + 1]) else _MAIN
    )
    chunk = _cold(place, first)
    if chunk < 0:
        chunk = _cold(place, 1 - first)
    for queue in (_MAIN, _SMALL):
        if chunk < 0 and numbers[_PASSED + queue] > 0:
            chunk = passed[queue, 0]
            passed[queue, 0] = _NOBODY
    for queue in (_SMALL, _MAIN):
        for i in range(numbers[_PASSED + queue]):
            each = passed[queue, i]
            if queue == _MAIN:
                if each >= 0:
                    place.nodes[each, _USES] -= 1
                    _move(place, each, _MAIN)
                continue
            while (
                each >= 0
                and place.nodes[each, _STATE] == _HERE
                and place.nodes[each, _QUEUE] == _SMALL
            ):
                place.nodes[each, _USES] = 0
                _move(place, each, _MAIN)
                each = place.nodes[each, _PARENT]
    return chunk


@njit
def _choose(place: Any, policy: int, came_back: int) -> Any:
    if policy == _S3FIFO:
        return _choose_s3fifo(place)
    if policy != _ARC:
        return _pop(place, 0)
    once, target = place.numbers[_SIZE], place.numbers[_TARGET]
    first = (
        _SMALL
        if once > 0 and (once > target or (came_back == 1 + _MAIN and once == target))
        else _MAIN
    )
    chunk = _pop(place, first)
    return chunk if chunk >= 0 else _pop(place, 1 - first)


@njit
def _evict(place: Any, policy: int, capacity: int, chunk: int) -> None:
    numbers, queue = place.numbers, place.nodes[chunk, _QUEUE]
    place.nodes[chunk, _STATE] = _ABSENT
    numbers[_USED] -= 1
    numbers[_SIZE + queue] -= 1
    _continue_no_more(place, chunk)
    size = numbers[_SIZE] + numbers[_SIZE + 1]
    if policy == _S3FIFO:
        if queue == _SMALL:
            _remember(place, chunk, _SMALL)
        _keep_ghosts(place, _SMALL, max(1, size))
    elif policy == _ARC:
        _remember(place, chunk, queue)
        _keep_ghosts(place, _SMALL, capacity - numbers[_SIZE])
        _keep_ghosts(place, _MAIN, 2 * capacity - size - numbers[_GHOSTS])


@njit
def _continue_no_more(place: Any, chunk: int) -> None:
    parent = place.nodes[chunk, _PARENT]
    if parent >= 0:
        place.nodes[parent, _KIDS] -= 1
        if place.nodes[parent, _KIDS] == 0 and place.nodes[parent, _STATE] == _HERE:
            _push(place, parent)


@njit
def _come_back(place: Any, chunk: int, capacity: int) -> Any:
    """ARC: return 1 + the queue of the chunk's ghost, or 0."""
    numbers, ghost = place.numbers, place.nodes[chunk, _GHOST]
    place.nodes[chunk, _QUEUE] = _MAIN if ghost else _SMALL
    if ghost:
        ghosts, others = numbers[_GHOSTS + ghost - 1], numbers[_GHOSTS + 2 - ghost]
        step = max(1, others // ghosts)
        numbers[_TARGET] = (
            min(capacity, numbers[_TARGET] + step)
            if ghost == 1 + _SMALL
            else max(0, numbers[_TARGET] - step)
        )
        _forget(place, chunk)
    return ghost


@njit
def _reserve(place: Any, policy: int, capacity: int, chunk: int) -> Any:
    """Return the victim, _NOBODY or _NO_ROOM."""
    parent = place.nodes[chunk, _PARENT]
    if parent >= 0:
        place.nodes[parent, _KIDS] += 1
    came_back = _come_back(place, chunk, capacity) if policy == _ARC else 0
    victim = np.int64(_NOBODY)
    if place.numbers[_USED] >= capacity:
        victim = _choose(place, policy, came_back)
        if victim < 0:
            _continue_no_more(place, chunk)
            return np.int64(_NO_ROOM)
        _evict(place, policy, capacity, victim)
    place.numbers[_USED] += 1
    place.nodes[chunk, _STATE] = _RESERVED
    return victim


@njit
def _reserve_run(
    place: Any, policy: int, capacity: int, chunks: Any, totals: Any, victims: Any
) -> Any:
    for i in range(chunks.size):
        victim = _reserve(place, policy, capacity, np.int64(chunks[i]))
        if victim == _NO_ROOM:
            return i
        if victim >= 0:
            if totals[_EVICTED] < victims.size:
                victims[totals[_EVICTED]] = victim
            totals[_EVICTED] += 1
    return chunks.size


@njit
def _commit(place: Any, policy: int, chunk: int) -> None:
    place.nodes[chunk, _STATE] = _HERE
    place.nodes[chunk, _USES] = 0
    if policy == _S3FIFO:
        place.nodes[chunk, _QUEUE] = _MAIN if place.nodes[chunk, _GHOST] else _SMALL
        if place.nodes[chunk, _GHOST]:
            _forget(place, chunk)
    place.numbers[_SIZE + place.nodes[chunk, _QUEUE]] += 1
    _set_rank(place, chunk, -_now(place) if policy == _MRU else _now(place))


@njit
def _write(place: Any, policy: int, capacity: int, chunks: Any, totals: Any) -> None:
    for i in range(chunks.size):
        if place.nodes[chunks[i], _STATE] == _ABSENT:
            place.nodes[chunks[i], _STATE] = _MISSING
    for i in range(chunks.size):
        if place.nodes[chunks[i], _STATE] != _MISSING:
            continue
        victim = _reserve(place, policy, capacity, np.int64(chunks[i]))
        if victim == _NO_ROOM:
            place.nodes[chunks[i], _STATE] = _ABSENT
        elif victim >= 0:
            totals[_EVICTED_BELOW] += 1
    for i in range(chunks.size):
        if place.nodes[chunks[i], _STATE] == _RESERVED:
            _commit(place, policy, np.int64(chunks[i]))
            totals[_WRITTEN] += 1


@njit
def _serve(
    owned: Any,
    owned_below: Any,
    policy: int,
    capacity: int,
    lower_capacity: int,
    chunks: Any,
    starts: Any,
    found: Any,
    totals: Any,
    victims: Any,
) -> None:
    memory, lower = _lent(owned), _lent(owned_below)
    for request in range(starts.size - 1):
        at, end = starts[request], starts[request + 1]
        while at < end and memory.nodes[chunks[at], _STATE] == _HERE:
            at += 1
        found[request, 0] = at - starts[request]
        for i in range(at - 1, starts[request] - 1, -1):
            _touch(memory, policy, np.int64(chunks[i]))
        if lower_capacity:
            below = at
            while below < end and lower.nodes[chunks[below], _STATE] == _HERE:
                below += 1
            below = at + _reserve_run(memory, policy, capacity, chunks[at:below], totals, victims)
            for i in range(at, below):
                _touch(lower, policy, np.int64(chunks[i]))
            for i in range(at, below):
                _commit(memory, policy, np.int64(chunks[i]))
                _touch(memory, policy, np.int64(chunks[i]))
            found[request, 1] = below - at
            totals[_PROMOTED] += below - at
            at = below
        end = at + _reserve_run(memory, policy, capacity, chunks[at:end], totals, victims)
        for i in range(end - 1, at - 1, -1):
            _commit(memory, policy, np.int64(chunks[i]))
        totals[_STORED] += end - at
        if lower_capacity:
            _write(lower, policy, lower_capacity, chunks[at:end], totals)


_TRACE = (readonly(types.int32), readonly(types.int64), readonly(types.int32))


@compiled(
    types.void(
        *_TRACE,
        types.int64,
        types.int64,
        types.int64,
        types.int32[:, ::1],
        types.int64[::1],
        types.int32[::1],
    )
)
def _replay(
    chunks: Any,
    starts: Any,
    parents: Any,
    policy: int,
    capacity: int,
    lower_capacity: int,
    found: Any,
    totals: Any,
    victims: Any,
) -> None:
    memory = _new_place(parents, capacity)
    lower = _new_place(
        np.full(parents.size if lower_capacity else 0, _NOBODY, np.int32), lower_capacity
    )
    _serve(memory, lower, policy, capacity, lower_capacity, chunks, starts, found, totals, victims)


@compiled(types.void(*_TRACE, types.int64, types.int32[:, ::1], types.int64[::1]))
def _belady(chunks: Any, starts: Any, parents: Any, capacity: int, found: Any, totals: Any) -> None:
    place = _new_place(parents, capacity)
    again = np.empty(chunks.size, np.int64)
    later = np.full(parents.size, _NEVER, np.int64)
    for i in range(chunks.size - 1, -1, -1):
        again[i] = later[chunks[i]]
        later[chunks[i]] = i
    for request in range(starts.size - 1):
        at, end = starts[request], starts[request + 1]
        while at < end and place.nodes[chunks[at], _STATE] == _HERE:
            _set_rank(place, np.int64(chunks[at]), -again[at])
            at += 1
        found[request, 0] = at - starts[request]
        while at < end and again[at] < _NEVER and capacity > 0:
            if place.numbers[_USED] == capacity:
                victim = _pop(place, 0)
                if -place.nodes[victim, _RANK] <= again[at]:
                    _push(place, victim)
                    break
                _evict(place, _FIFO, capacity, victim)
                totals[_EVICTED] += 1
            chunk, parent = np.int64(chunks[at]), np.int64(parents[chunks[at]])
            place.nodes[chunk, _STATE] = _HERE
            place.numbers[_USED] += 1
            place.numbers[_SIZE] += 1
            if parent >= 0:
                place.nodes[parent, _KIDS] += 1
            _set_rank(place, chunk, -again[at])
            totals[_STORED] += 1
            at += 1
