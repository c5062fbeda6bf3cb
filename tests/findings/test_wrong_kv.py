"""Findings A2, A5 and A6: bytes that are another text's, or no text's.

Those that need vLLM are in `test_vllm.py`.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from kvhold.core.config import load_config
from kvhold.integrations.weights import model_identity
from kvhold.testing.cache import PLAIN, a_prompt, fill, store
from kvhold.testing.tier import make_key
from kvhold.tiers import guard
from kvhold.tiers.ram import Entry
from tests.cache.below import cache_over, forget
from tests.findings.both import (
    PROMPT,
    SPACE,
    WITHIN_S,
    a_client,
    a_node,
    eventually,
    offsets_of,
    wrong_chunks,
)

try:
    from kvhold.node.central_store import CentralStore
except ImportError:  # 5f474b0
    from kvhold.node.shelf import Shelf as CentralStore  # type: ignore[import-not-found, no-redef]
from tests.tiers.memory import PLUGIN, a_place


class TestA2:
    @pytest.mark.parametrize(
        "file", ["modeling_own.py", "model.tensors", "part/model-1.safetensors"]
    )
    def test_weights_and_code_are_named_whatever_their_files_are_called(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "notes"))
        found = set()
        for number, content in enumerate(("one", "two")):
            folder = tmp_path / str(number)
            (folder / file).parent.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(b"weights")
            (folder / file).write_text(content)
            found.add(model_identity(str(folder), None))
        assert len(found) == 2, "other code and other weights, and one name"


class TestA5:
    @pytest.mark.server
    def test_a_stray_write_of_one_client_reaches_no_other(self, tmp_path: Path) -> None:
        socket = tmp_path / "node.sock"
        with (
            a_node(socket),
            a_client(socket) as writer,
            a_client(socket) as stray,
            a_client(socket) as reader,
        ):
            store(writer, PROMPT)
            third = offsets_of(reader, PROMPT)[2]
            with stray.reserve(PLAIN, a_prompt(SPACE, 16, 2).chunks()) as room:
                room.buffer[third + 100] ^= 1
                assert wrong_chunks(reader, PROMPT) == []

    def test_damage_in_memory_is_not_sealed_as_right_on_its_way_below(self) -> None:
        with a_place() as place, cache_over(place.url()) as cache:
            place.hold("probe")  # the chunks wait to be written
            names = PROMPT.chunks()
            with cache.reserve(PLAIN, names) as room:
                fill(room, PLAIN, names)
                buffer, first = room.buffer, int(room.chunks().offsets[0])
                room.commit()
                place.wait_for("probe")
                buffer[first + 5] ^= 1
            place.let_go("probe")
            assert cache.flush(deadline_s=WITHIN_S)
            forget(cache)
            assert wrong_chunks(cache, PROMPT) == [], (
                "the damaged bytes came back from below with a valid checksum"
            )


class TestA6:
    async def test_the_central_store_gives_the_memory_of_a_late_read_to_no_other_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read of a tier that hangs, though its caller has left, and writes in the end."""
        monkeypatch.setattr(guard, "_LEAVE_S", 0.01)
        nbytes, late = 512 << 10, make_key(0)
        with a_place() as place:
            settings = {
                "ram_bytes": "4MiB",
                "huge_pages": "never",
                "tiers": [place.url()],
                "plugins": [PLUGIN],
            }
            shelf = CentralStore(load_config(settings, environ={}))
            place.values[late] = b"L" * nbytes
            place.deaf = True
            place.hold("get")
            caller = asyncio.ensure_future(shelf.bring([late]))
            await asyncio.to_thread(place.wait_for, "get")
            caller.cancel()
            with suppress(asyncio.CancelledError):
                await caller
            entries = [shelf.reserve(make_key(number), nbytes, None) for number in range(1, 9)]
            puts = [shelf.ram.view(entry) for entry in entries if isinstance(entry, Entry)]
            for view in puts:
                view[:] = b"P" * nbytes
            assert len(puts) >= 7
            place.let_go("get")
            await asyncio.to_thread(eventually, lambda: not place.inside["get"])
            assert [
                number for number, view in enumerate(puts) if bytes(view) != b"P" * nbytes
            ] == [], "written over by the late read"
            await shelf.close()
