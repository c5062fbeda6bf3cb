"""How a client maps the arena: two mappings at most, faulted in ahead only so far, so that page
tables stay in proportion to use.
"""

from pathlib import Path

import pytest

from kvhold.node import link as link_module
from kvhold.testing.cache import a_prompt, read, store
from tests.node.nodes import SPACE, RunningNode

MIB = 1 << 20


def mappings() -> dict[str, tuple[str, int]]:
    """Of each mapping of an arena in this process, by its addresses: its rights, and the bytes of
    it that have a page table's entry.
    """
    found: dict[str, tuple[str, int]] = {}
    place, rights = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, second, *_ = line.split()
        if not first.endswith(":"):
            place, rights = (first, second) if "memfd:kvhold-arena" in line else ("", "")
        elif place and first == "Rss:":
            found[place] = (rights, 1024 * int(second))
    return found


def test_only_the_first_pages_are_faulted_in_ahead(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_TOUCHED_BYTES", MIB)
    others = mappings().keys()  # of earlier tests in this process

    def mapped() -> list[tuple[str, int]]:
        return [mapping for place, mapping in mappings().items() if place not in others]

    client = node.client()
    client.register(SPACE)
    assert mapped() == [], "who only asks maps nothing"
    assert client.arena_buffer.nbytes == 16 * MIB
    link = client._link
    assert link is not None
    link._mappings[False]._toucher.wait()
    ((rights, nbytes),) = mapped()
    assert rights.startswith("r--")
    assert nbytes <= 2 * MIB, "Linux maps some pages around one that is read"
    store(client, a_prompt(SPACE, 64))
    link._mappings[True]._toucher.wait()
    assert sorted(rights[:2] for rights, _ in mapped()) == ["r-", "rw"]
    assert sum(nbytes for _, nbytes in mapped()) <= 5 * MIB
    assert read(client, a_prompt(SPACE, 64)) == 64
