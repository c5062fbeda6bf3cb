"""The rounds with systems that are made up: who is asked what, and what happens to one that fails
or lies. No processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from kvhold_lab.bench.compare_engines.rows import (
    LOOKUP,
    MEMORY,
    RETRIEVE,
    START,
    STORE,
    WRITTEN,
    Measured,
    make_rows,
)
from kvhold_lab.bench.compare_engines.run import Work, measure
from kvhold_lab.bench.compare_engines.systems import (
    CHECKED_LIMIT,
    IN_PROCESS,
    KVHOLD,
    KVHOLD_CACHED,
    LIMITS,
    REDIS_LIMIT,
    SERVER,
    PeerFailed,
    PeerSystem,
)
from kvhold_lab.engines.process import EngineFailed

WORK = Work(num_tokens=512, lookup_tokens=1024, layers=1, heads=1, head_dim=8, rounds=2)

Answers: TypeAlias = dict[str, Callable[[], dict[str, object]]]


class Child:
    """Answers lines as `child.py` does, without a cache."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.options: dict[str, object] = {}
        self.closed = False
        self.answers: dict[str, Callable[[], dict[str, object]]] = {}
        self._stored: dict[tuple[int, ...], str] = {}

    def ask(self, line: bytes, doing: str) -> bytes:
        assert not self.closed, f"{doing}: was ended before"
        operation = json.loads(line)
        self.asked.append(operation["op"])
        if operation["op"] == "start":
            self.options = operation
        tokens = tuple(operation.get("tokens", ()))
        if operation["op"] == "store":
            self._stored[tokens] = f"of {operation['seed']}"
        answer = {
            "seconds": 0.5,
            "written_s": 1.0,
            "num_tokens": len(tokens),
            "checksum": self._stored.get(tokens, "nothing"),
            "nbytes": 7,
        }
        if operation["op"] in self.answers:
            answer |= self.answers[operation["op"]]()
        return json.dumps(answer).encode()

    def close(self) -> None:
        self.closed = True


class Machine:
    """Launches children, and keeps them. unwell: what a system's children answer to an operation
    instead.
    """

    def __init__(self, unwell: dict[str, Answers] | None = None) -> None:
        self.children: dict[str, list[Child]] = {}
        self._unwell = unwell or {}

    def launch(self, name: str) -> PeerSystem:
        child = Child()
        child.answers = self._unwell.get(name, {})
        self.children.setdefault(name, []).append(child)
        return PeerSystem(name, child.ask, child.close)


def run(machine: Machine, folder: Path, tiers: tuple[str, ...] = ("ram", "disk")) -> Measured:
    measured = measure(
        WORK, (KVHOLD, SERVER), tiers, machine.launch, folder=folder, say=lambda _: None
    )
    assert all(child.closed for children in machine.children.values() for child in children)
    assert list(folder.iterdir()) == []
    return measured


def test_a_disk_is_measured_in_both_modes_of_ours_beside_its_limits_with_and_without_the_page_cache(
    tmp_path: Path,
) -> None:
    machine = Machine()
    tiers = ("ram", "disk", "cached-disk")
    measured = measure(
        WORK,
        (KVHOLD, KVHOLD_CACHED, SERVER),
        tiers,
        machine.launch,
        folder=tmp_path,
        say=lambda _: None,
    )
    for tier, names in (
        ("ram", {KVHOLD, SERVER}),
        *((disk, {KVHOLD, KVHOLD_CACHED, SERVER}) for disk in tiers[1:]),
    ):
        for operation in (RETRIEVE, WRITTEN) if tier != "ram" else (RETRIEVE,):
            for cell in measured.cells[operation, tier]:
                assert cell.seconds.keys() - set(LIMITS) == names
                assert ("limit: page cache" in cell.seconds) == (tier != "ram")
                assert (CHECKED_LIMIT in cell.seconds) == (tier != "ram" and operation == RETRIEVE)
    assert [child.options["page_cache"] for child in machine.children[KVHOLD_CACHED]] == [
        False,
        True,
    ]
    assert {child.options["tier"] for child in machine.children[KVHOLD_CACHED]} == {"disk"}


@pytest.mark.server
def test_redis_is_measured_beside_what_it_gives_over_plain_sockets(tmp_path: Path) -> None:
    measured = run(Machine(), tmp_path, tiers=("redis",))
    if "redis-server" in measured.errors.get(("redis", KVHOLD), ""):
        pytest.skip(measured.errors["redis", KVHOLD])
    for operation, of in ((STORE, set()), (WRITTEN, {REDIS_LIMIT}), (RETRIEVE, {REDIS_LIMIT})):
        assert [cell.seconds.keys() for cell in measured.cells[operation, "redis"]] == [
            {KVHOLD, SERVER} | of
        ] * WORK.rounds


def silent() -> dict[str, object]:
    raise EngineFailed("store by it: was silent for too long and was killed")


def test_everybody_does_the_same_and_the_first_round_does_not_count(tmp_path: Path) -> None:
    machine = Machine()
    measured = run(machine, tmp_path)
    assert not measured.errors
    in_ram = ["start", *["store", "retrieve", "forget"] * 3, "stop"]
    on_disk = ["start", *["store", "forget", "retrieve"] * 3, "stop"]
    lookups = ["start", "store", *["lookup"] * 5, "stop"]
    alone = ["start", "store", "retrieve", "memory", "stop"]
    for name in (KVHOLD, SERVER):
        assert [child.asked for child in machine.children[name]] == [
            in_ram,
            on_disk,
            lookups,
            alone,
            alone,
        ]
    cells = {key: len(found) for key, found in measured.cells.items()}
    assert cells == {
        (STORE, "ram"): 2,
        (RETRIEVE, "ram"): 2,
        (STORE, "disk"): 2,
        (WRITTEN, "disk"): 2,
        (RETRIEVE, "disk"): 2,
        (LOOKUP, "ram"): 4,
        (START, "-"): 2,
        (MEMORY, "-"): 2,
    }
    assert set(measured.equal.values()) == {True}


@pytest.mark.parametrize("operation", ["start", "store", "retrieve", "forget"])
def test_one_that_fails_is_out_with_its_error_and_the_others_go_on(
    tmp_path: Path, operation: str
) -> None:
    machine = Machine(
        {SERVER: {operation: lambda: {"error": "RuntimeError: no supported connector"}}}
    )
    measured = run(machine, tmp_path, tiers=("disk",))
    assert measured.errors["disk", SERVER] == "RuntimeError: no supported connector"
    rows = make_rows(measured)
    assert [row.error for row in rows if (row.system, row.tier) == (SERVER, "disk")] == [
        "RuntimeError: no supported connector"
    ]
    ours = [row for row in rows if (row.system, row.operation) == (KVHOLD, RETRIEVE)]
    assert [(row.tier, row.equal) for row in ours] == [("disk", True)]


def test_one_that_dies_is_out_with_the_end_of_its_log(tmp_path: Path) -> None:
    measured = run(Machine({SERVER: {"store": silent}}), tmp_path, tiers=("disk",))
    assert measured.errors["disk", SERVER].endswith("was silent for too long and was killed")


@pytest.mark.parametrize(
    ("operation", "lie"),
    [
        ("retrieve", {"checksum": "of something else"}),
        ("retrieve", {"num_tokens": 256}),
    ],
)
def test_bytes_that_were_not_stored_are_told(
    tmp_path: Path, operation: str, lie: dict[str, object]
) -> None:
    measured = run(Machine({KVHOLD: {operation: lambda: lie}}), tmp_path, tiers=("disk",))
    assert (measured.equal[RETRIEVE, "disk", KVHOLD], measured.equal[RETRIEVE, "disk", SERVER]) == (
        False,
        True,
    )


def test_one_that_stored_something_else_is_told_even_if_it_gets_that_back(tmp_path: Path) -> None:
    other: Answers = {
        "store": lambda: {"checksum": "mine"},
        "retrieve": lambda: {"checksum": "mine"},
    }
    measured = run(Machine({SERVER: other}), tmp_path, tiers=("disk",))
    assert (measured.equal[RETRIEVE, "disk", KVHOLD], measured.equal[RETRIEVE, "disk", SERVER]) == (
        True,
        False,
    )


@pytest.mark.parametrize("answer", [b"no json", b"[]", b'{"seconds": "many"}', b'{"unheard": 1}'])
def test_what_is_no_answer_is_a_failure(answer: bytes) -> None:
    with pytest.raises(PeerFailed):
        PeerSystem(IN_PROCESS, lambda line, doing: answer, lambda: None).do("lookup", tokens=[1])
