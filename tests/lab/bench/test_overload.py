"""`kvhold bench overload` in small: every row is there, and what is exact in it is."""

from kvhold_lab.bench.overload import OverloadSizes, rows


def test_an_overloaded_node_loses_nobody_and_every_long_command_has_its_row() -> None:
    measured = {
        row.name: row
        for row in rows(
            OverloadSizes(
                clients=12, chunks=3000, long_tokens=4000, storing=4, lookups=4, spin_s=0.2
            )
        )
    }
    for name in ("connections lost", "refused stores"):
        assert measured[name].value == 0
    commands = (
        "a lookup of 1,488 keys",
        "a claim of its first shard",
        "snapshot",
        "status",
        "lookups and stores",
        "clear",
    )
    for command in commands:
        assert measured[f"longest turn, {command}"].value > 0
        assert measured[f"longest turn, {command}: of its thread"].goal == 2
    for name in (
        "longest pause of this machine",
        "the disk's index",
        "memory's index",
        "a disk of 3,000 chunks serves",
    ):
        assert measured[name].value > 0
    assert any(name.startswith("p99 of a lookup of 32,000 tokens") for name in measured)
