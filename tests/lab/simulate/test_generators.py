"""Made workloads: equal for equal seeds, and each of the kind that its name says."""

from collections import Counter

import numpy as np
import pytest

from kvhold_lab.simulate.generators import GENERATORS, generate
from kvhold_lab.simulate.requests import TimedRequest
from kvhold_lab.simulate.trace import Cut, trace_of


def made(name: str, *, seed: int = 1, minutes: float = 2.0) -> list[TimedRequest]:
    return list(generate(name, seed=seed, minutes=minutes))


def a_cut(name: str, *, minutes: float = 2.0) -> Cut:
    return trace_of(made(name, minutes=minutes), name=name).cut(512)


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_seeds_make_equal_requests(name: str) -> None:
    requests = made(name)
    assert requests == made(name) != made(name, seed=2)
    assert len(requests) >= 2
    assert not any(request.fault(512) for request in requests)
    times = [request.timestamp for request in requests]
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 120_000


@pytest.mark.parametrize("name", GENERATORS)
def test_an_id_stands_for_all_text_up_to_its_end(name: str) -> None:
    before: dict[int, int] = {}
    for request in made(name, minutes=1.0):
        parent = -1
        for hash_id in request.hash_ids:
            assert before.setdefault(hash_id, parent) == parent
            parent = hash_id


def test_nothing_comes_back_in_new() -> None:
    cut = a_cut("new")
    assert cut.chunks.size == cut.num_ids > 100


def test_a_loop_is_a_little_larger_than_64_gib() -> None:
    cut = a_cut("loop", minutes=5.0)
    assert cut.num_ids == 1088 == 17 * 1024 // 16
    firsts = cut.chunks[cut.starts[:-1]]
    assert np.array_equal(firsts[68:], firsts[:-68]), "always in the same order"
    assert len(set(firsts.tolist())) == 68


def test_a_turnover_leaves_nothing_of_before() -> None:
    requests = made("turnover", minutes=4.0)
    before, after = (
        Counter(
            hash_id
            for request in requests
            if (request.timestamp >= 120_000) is late
            for hash_id in request.hash_ids
        )
        for late in (False, True)
    )
    assert not before.keys() & after.keys()
    assert max(before.values()) > 10 and max(after.values()) > 10


def test_a_scan_is_asked_once_and_all_at_once() -> None:
    requests = made("scan", minutes=6.0)
    num_at = Counter(request.timestamp for request in requests)
    [(at, num)] = num_at.most_common(1)
    assert at >= 300_000 and num == 501
    uses = Counter(request.hash_ids[0] for request in requests)
    firsts = [request.hash_ids[0] for request in requests if request.timestamp == at]
    assert sum(uses[first] == 1 for first in firsts) >= 500
    assert max(uses.values()) > 5
