"""The disk tier under any order of calls, restarts and interference: a hit is exact, the account is
what the file system says.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.disk import DiskConfig, DiskTier
from kvhold.tiers.policies import POLICIES

LIMIT_BYTES = 64 << 10
LARGEST_BYTES = 40_000
numbers = st.lists(st.integers(0, 15), max_size=6)


class AnyOrder(RuleBasedStateMachine):
    """Each number has one value, of a size of its own, so that any hit can be judged."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        paths=st.integers(1, 2),
        io_threads=st.integers(1, 3),
    )
    def begin(self, policy: str, paths: int, io_threads: int) -> None:
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp())
        path = ",".join(str(self.folder / str(n)) for n in range(paths))
        self.config = DiskConfig(
            path=path, max_bytes=LIMIT_BYTES, policy=policy, io_threads=io_threads
        )
        self.tier = DiskTier(self.config)
        self.run(self.tier.check())

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    @rule(chosen=numbers)
    def put(self, chosen: list[int]) -> None:
        stored = self.run(store(self.tier, {make_key(n): value_of(n) for n in chosen}))
        sizes = self.run(self.tier.probe([make_key(n) for n in dict.fromkeys(chosen)]))
        for n, is_stored, nbytes in zip(dict.fromkeys(chosen), stored, sizes, strict=True):
            assert nbytes in ((len(value_of(n)), None) if is_stored else (None,))
        share = self.config.max_bytes // len(self.config.path.split(","))
        has_room = all(-(-len(value_of(n)) // 4096) * 4096 <= share for n in chosen)
        assert len(set(chosen)) != 1 or all(stored) or not has_room, "one alone has room"

    @rule(chosen=numbers)
    def get(self, chosen: list[int]) -> None:
        keys = [make_key(n) for n in chosen]
        sizes = self.run(self.tier.probe(keys))
        for n, nbytes, got in zip(
            chosen,
            sizes,
            self.run(fetch(self.tier, keys, [LARGEST_BYTES] * len(keys))),
            strict=True,
        ):
            assert got in (value_of(n), None)
            assert nbytes in (len(value_of(n)), None)

    @rule(chosen=numbers)
    def delete(self, chosen: list[int]) -> None:
        keys = [make_key(n) for n in chosen]
        there = {
            key
            for key, nbytes in zip(keys, self.run(self.tier.probe(keys)), strict=True)
            if nbytes is not None
        }
        removed = self.run(self.tier.delete(keys))
        assert sum(removed) == len(there)
        assert self.run(self.tier.probe(keys)) == [None] * len(keys)

    @rule(puts=numbers, gets=numbers, deletes=numbers, turns=st.none() | st.integers(0, 12))
    def all_at_once(
        self, puts: list[int], gets: list[int], deletes: list[int], turns: int | None
    ) -> None:
        """Cancelled after so many turns of the loop, or not at all."""

        async def overlap() -> None:
            calls: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(store(self.tier, {make_key(n): value_of(n) for n in puts})),
                asyncio.ensure_future(self.tier.delete([make_key(n) for n in deletes])),
                asyncio.ensure_future(
                    fetch(self.tier, [make_key(n) for n in gets], [LARGEST_BYTES] * len(gets))
                ),
                asyncio.ensure_future(
                    store(self.tier, {make_key(n): value_of(n) for n in reversed(puts)})
                ),
            ]
            if turns is not None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                for call in calls:
                    call.cancel()
            await asyncio.wait(calls)
            if not calls[2].cancelled():
                assert all(
                    got in (value_of(n), None)
                    for n, got in zip(gets, calls[2].result(), strict=True)
                )

        self.run(overlap())

    @rule(which=st.integers(0, 99), size=st.none() | st.integers(0, LARGEST_BYTES))
    def somebody_cuts_or_removes_a_file(self, which: int, size: int | None) -> None:
        files = self.files()
        if not files:
            return
        file = files[which % len(files)]
        if size is None:
            file.unlink()
        else:
            os.truncate(file, size)
        key = bytes.fromhex(file.name.partition("-")[0])
        same = size is not None and size == int(file.name.split("-")[1])
        got = self.run(fetch(self.tier, [key], [LARGEST_BYTES]))
        assert same or got == [None]

    @rule(junk=st.binary(max_size=10), limit_bytes=st.sampled_from([LIMIT_BYTES, LIMIT_BYTES // 2]))
    def restart(self, junk: bytes, limit_bytes: int) -> None:
        before = set(self.run(scanned(self.tier)))
        self.run(self.tier.close())
        for path in self.config.path.split(","):
            (Path(path) / "new" / "host-1.1.1.0123456789abcdef").write_bytes(junk)
        self.config = DiskConfig(
            path=self.config.path, max_bytes=limit_bytes, policy=self.config.policy
        )
        self.tier = DiskTier(self.config)
        self.run(self.tier.check())
        after = set(self.run(scanned(self.tier)))
        assert after <= before
        assert after == before or limit_bytes < LIMIT_BYTES

    @invariant()
    def the_account_is_what_the_file_system_says(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert (
            self.tier.used_bytes
            == sum(file.stat().st_blocks * 512 for file in self.files())
            <= self.config.max_bytes
        )
        assert len(self.files()) == len(self.run(scanned(self.tier)))
        assert list(self.folder.glob("*/new/*")) == []

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*/[0-9a-f][0-9a-f]/*"))

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.run(self.tier.close())
            self.runner.close()
            shutil.rmtree(self.folder)


def value_of(number: int) -> bytes:
    return make_value(number, 1 + number * 2000)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=25)
