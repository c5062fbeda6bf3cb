"""The arena: one region, several processes, refused when it cannot be had, and gone when nobody
maps it.
"""

import ctypes
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhold.core.errors import CapacityError
from kvhold.core.sizes import parse_size
from kvhold.memory.arena import PAGE_BYTES, Arena, Toucher
from kvhold.memory.host import HUGE_PAGE_BYTES, available_bytes, free_huge_pages

MIB = 1 << 20
NR_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


def is_mapped(inode: int) -> bool:
    """Whether this process maps the file with that inode."""
    return any(
        line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines()
    )


def arena_files() -> set[int]:
    """Descriptors of arenas that this process has open."""
    links = {
        int(link.name): str(link.readlink())
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    }
    return {fd for fd, target in links.items() if target.startswith("/memfd:kvhold-arena")}


def inode(arena: Arena) -> int:
    return os.fstat(arena.fd).st_ino


def present_bytes(arena: Arena) -> int:
    """Bytes for which there are pages."""
    return os.fstat(arena.fd).st_blocks * 512


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(4 * MIB, huge_pages="never") as arena:
        yield arena


class TestCreate:
    @pytest.mark.parametrize(
        ("asked", "got"), [(1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)]
    )
    def test_it_has_at_least_what_was_asked_in_whole_pages_of_either_size(
        self, asked: int, got: int
    ) -> None:
        with Arena.create(asked, huge_pages="never") as arena:
            assert (arena.nbytes, len(arena.buffer), os.fstat(arena.fd).st_size) == (got, got, got)
            assert arena.nbytes % PAGE_BYTES == 0

    def test_it_is_empty_and_takes_no_memory_yet(self, arena: Arena) -> None:
        assert present_bytes(arena) == 0
        assert arena.view(3 * MIB, 10) == bytes(10)

    @pytest.mark.parametrize("nbytes", [0, -1, -(2**40)])
    def test_nothing_is_not_an_arena(self, nbytes: int) -> None:
        with pytest.raises(CapacityError, match="ram_bytes"):
            Arena.create(nbytes)

    def test_more_than_the_host_has_is_refused_with_what_would_fit(self) -> None:
        before = arena_files()
        with pytest.raises(CapacityError) as error:
            Arena.create(1 << 60)
        said = re.fullmatch(
            r"ram_bytes = (.*) does not fit: this host has (.*) free .* set ram_bytes to "
            r"at most (.*)",
            str(error.value),
        )
        assert said is not None
        assert parse_size(said[1]) == 1 << 60
        assert parse_size(said[3]) < parse_size(said[2]) <= available_bytes() * 1.5
        assert arena_files() <= before

    def test_what_the_kernel_refuses_is_a_capacity_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where memory is not to be had although it seemed free, or the process may map no more."""
        monkeypatch.setattr("kvhold.memory.arena.available_bytes", lambda: 1 << 63)
        before = arena_files()
        with pytest.raises(CapacityError, match=r"ram_bytes: the host refused an arena of .* TiB"):
            Arena.create(1 << 61)
        assert arena_files() <= before

    def test_its_descriptor_is_not_inherited(self, arena: Arena) -> None:
        assert not os.get_inheritable(arena.fd)


class TestView:
    def test_views_and_buffer_are_the_same_memory(self, arena: Arena) -> None:
        arena.view(MIB, 5)[:] = b"hello"
        assert bytes(arena.buffer[MIB : MIB + 5]) == b"hello"
        assert ctypes.string_at(arena.regions[0].address + MIB, 5) == b"hello"
        assert np.frombuffer(arena.buffer, np.uint8)[MIB] == ord("h")

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, 0), (0, 4 * MIB), (4 * MIB, 0), (4 * MIB - 1, 1)]
    )
    def test_a_view_may_reach_to_either_end(self, arena: Arena, offset: int, nbytes: int) -> None:
        assert arena.view(offset, nbytes).nbytes == nbytes

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(-1, 1), (0, 4 * MIB + 1), (4 * MIB, 1), (5 * MIB, 0), (10, -1)]
    )
    def test_a_view_outside_is_a_bug(self, arena: Arena, offset: int, nbytes: int) -> None:
        with pytest.raises(AssertionError):
            arena.view(offset, nbytes)


class TestAttach:
    ENGINE = """
import socket, sys
from kvhold.memory.arena import Arena
node = socket.socket(fileno=int(sys.argv[1]))
said, (fd,), _, _ = socket.recv_fds(node, 16, 1)
with Arena.attach(fd, int(said), writable=True) as arena:
    node.sendall(arena.view(100, 5))
    arena.view(arena.nbytes - 5, 5)[:] = b"world"
    node.sendall(b"!")
    node.recv(1)  # until the node has let go of its own mapping
    node.sendall(arena.view(100, 5))
"""

    def test_another_process_maps_the_same_memory_and_keeps_it_when_the_owner_goes(self) -> None:
        ours, theirs = socket.socketpair()
        arena = Arena.create(4 * MIB, huge_pages="never")
        arena.view(100, 5)[:] = b"hello"
        command = [sys.executable, "-c", self.ENGINE, str(theirs.fileno())]
        with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as engine:
            theirs.close()
            socket.send_fds(ours, [str(arena.nbytes).encode()], [arena.fd])
            with ours.makefile("rb") as answers:
                assert answers.read(6) == b"hello!"
                assert bytes(arena.view(arena.nbytes - 5, 5)) == b"world"
                arena.close()
                ours.sendall(b".")
                assert answers.read(5) == b"hello"
        assert engine.returncode == 0

    def test_less_than_was_announced_is_refused_with_both_numbers(self, arena: Arena) -> None:
        fd = os.dup(arena.fd)
        with pytest.raises(
            CapacityError, match=rf"has {4 * MIB} bytes, but {4 * MIB + 1} were announced"
        ):
            Arena.attach(fd, 4 * MIB + 1)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_more_than_was_announced_is_mapped_as_far_as_announced(self, arena: Arena) -> None:
        with Arena.attach(os.dup(arena.fd), 2 * MIB) as part:
            assert (part.nbytes, len(part.buffer)) == (2 * MIB, 2 * MIB)

    def test_what_cannot_be_mapped_is_refused_and_closed(self, arena: Arena) -> None:
        fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY)
        with pytest.raises(CapacityError, match="refused to map"):
            Arena.attach(fd, 4 * MIB, writable=True)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_it_takes_over_the_descriptor(self, arena: Arena) -> None:
        before = arena_files()
        Arena.attach(os.dup(arena.fd), 4 * MIB).close()
        assert arena_files() <= before


class TestClose:
    def test_it_is_unmapped_and_leaves_no_descriptor(self) -> None:
        before = arena_files()
        arena = Arena.create(2 * MIB, huge_pages="never")
        file = inode(arena)
        assert is_mapped(file)
        arena.close()
        arena.close()
        assert not is_mapped(file)
        assert arena_files() <= before

    @pytest.mark.parametrize("kind", ["a view", "an array", "the buffer itself"])
    def test_live_views_keep_the_memory_and_the_last_one_takes_it_along(self, kind: str) -> None:
        arena = Arena.create(2 * MIB, huge_pages="never")
        file = inode(arena)
        arena.view(10, 5)[:] = b"hello"
        views: dict[str, Callable[[], Any]] = {
            "a view": lambda: arena.view(10, 5),
            "an array": lambda: np.frombuffer(arena.buffer, np.uint8)[10:15],
            "the buffer itself": lambda: memoryview(arena.buffer)[10:15],
        }
        view = views[kind]()
        arena.close()
        assert bytes(view) == b"hello"
        view[:] = memoryview(b"world") if kind != "an array" else np.frombuffer(b"world", np.uint8)
        assert bytes(view) == b"world"
        del view, views
        assert not is_mapped(file), "although the closed arena is still referred to"
        arena.close()

    def test_a_closed_arena_has_no_bytes(self) -> None:
        arena = Arena.create(2 * MIB, huge_pages="never")
        arena.close()
        assert len(arena.buffer) == 0


class TestToucher:
    def test_it_faults_in_every_page_in_order_and_says_so(self) -> None:
        progress: list[int] = []
        with Arena.create(66 * MIB, huge_pages="never") as arena:
            toucher = Toucher(arena.regions, progress.append).start()
            toucher.wait()
            assert toucher.done
            assert toucher.touched_bytes == arena.nbytes == present_bytes(arena)
            assert progress == list(range(2 * MIB, 68 * MIB, 2 * MIB))

    def test_one_that_is_stopped_before_its_time_touches_nothing(self) -> None:
        with Arena.create(2 * MIB, huge_pages="never") as arena:
            toucher = Toucher(arena.regions, after_s=3600).start()
            toucher.stop()
            assert not toucher._thread.is_alive()
            assert (toucher.touched_bytes, present_bytes(arena)) == (0, 0)

    def test_it_changes_no_byte(self, arena: Arena) -> None:
        arena.view(MIB - 2, 5)[:] = b"hello"
        Toucher(arena.regions).start().wait()
        assert bytes(arena.view(MIB - 2, 5)) == b"hello"
        assert arena.view(0, MIB - 2) == bytes(MIB - 2)

    def test_it_stops_after_the_step_in_hand(self) -> None:
        reached = threading.Event()

        def first_step(touched: int) -> None:
            reached.set()
            toucher._stop.wait()  # the step in hand lasts until it has been told to stop

        with Arena.create(66 * MIB, huge_pages="never") as arena:
            toucher = Toucher(arena.regions, first_step)
            toucher.start()
            reached.wait()
            toucher.stop()
            assert not toucher.done
            assert toucher.touched_bytes == present_bytes(arena) == 2 * MIB
            toucher.wait()
            toucher.stop()

    def test_one_stopped_before_it_began_touches_nothing(self, arena: Arena) -> None:
        toucher = Toucher(arena.regions)
        toucher.stop()
        toucher.start().wait()
        assert (toucher.touched_bytes, present_bytes(arena)) == (0, 0)

    def test_a_kernel_that_cannot_is_no_fault(
        self, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("kvhold.memory.arena._MADV_POPULATE_WRITE", 9999)
        toucher = Toucher(arena.regions).start()
        toucher.wait()
        assert (toucher.done, toucher.touched_bytes) == (False, 0)
        assert "not faulted in ahead: Invalid argument" in caplog.text
        arena.view(0, 5)[:] = b"hello"


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Eight huge pages more than are taken; the host's setting is put back."""
    try:
        before = NR_HUGE_PAGES.read_text()
        NR_HUGE_PAGES.write_text(str(int(before) + 8))
    except OSError as error:
        pytest.skip(f"this user cannot reserve huge pages: {error}")
    try:
        if free_huge_pages() < 8:
            pytest.skip("the host has no memory in one piece for huge pages")
        yield
    finally:
        NR_HUGE_PAGES.write_text(before)


class TestHugePages:
    def test_always_without_enough_of_them_says_how_many_and_where(self) -> None:
        ready = free_huge_pages()
        with pytest.raises(CapacityError) as error:
            Arena.create((ready + 1000) * HUGE_PAGE_BYTES, huge_pages="always")
        assert f"{ready + 1000} pages of 2 MiB are needed and {ready} are free" in str(error.value)
        assert "vm.nr_hugepages" in str(error.value)
        assert "'auto'" in str(error.value)

    def test_auto_without_enough_of_them_takes_normal_pages(self) -> None:
        with Arena.create((free_huge_pages() + 8) * HUGE_PAGE_BYTES) as arena:
            assert not arena.huge

    @pytest.mark.usefixtures("huge_pages")
    @pytest.mark.parametrize("setting", ["auto", "always"])
    def test_an_arena_in_huge_pages_works_like_any_other(self, setting: str) -> None:
        before = free_huge_pages()
        with Arena.create(3 * MIB, huge_pages=setting) as arena:
            assert (arena.huge, arena.nbytes) == (True, 4 * MIB)
            assert free_huge_pages() == before - 2, "they are promised from the start"
            Toucher(arena.regions).start().wait()
            arena.view(MIB, 5)[:] = b"hello"
            with Arena.attach(os.dup(arena.fd), arena.nbytes, huge=True) as other:
                assert bytes(other.view(MIB, 5)) == b"hello"
            assert free_huge_pages() == before - 2
        assert free_huge_pages() == before

    @pytest.mark.usefixtures("huge_pages")
    def test_pages_promised_to_another_arena_are_not_counted_on(self) -> None:
        ready = free_huge_pages()
        # untouched: promised, not yet taken
        with Arena.create(ready * HUGE_PAGE_BYTES, huge_pages="always"):
            with Arena.create(1) as next_one:
                assert not next_one.huge
            with pytest.raises(CapacityError, match="and 0 are free"):
                Arena.create(1, huge_pages="always")

    @pytest.mark.usefixtures("huge_pages")
    def test_never_leaves_them_alone(self) -> None:
        with Arena.create(1, huge_pages="never") as arena:
            assert not arena.huge


def test_nobody_who_has_the_descriptor_can_shrink_the_arena() -> None:
    with Arena.create(1 << 20) as arena, pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
