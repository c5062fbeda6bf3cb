"""Folders and files of ours: what another user could have put there, or could change, is refused
before it is used.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhold.core.errors import TierDenied
from kvhold.testing.tier import fetch, make_key, store
from kvhold.tiers.disk import DiskTier
from kvhold.tiers.files.safe import Unsafe, open_folder, open_own_file
from kvhold.tiers.fs import SharedFilesTier
from kvhold.tiers.url import parse_url

only_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can give a file to somebody else"
)
NOBODY = 65534


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """A umask as a user, or a library, may have set it."""
    before = os.umask(mask)  # noqa: TID251 - what is tested
    try:
        yield
    finally:
        os.umask(before)  # noqa: TID251


def opens(path: Path, **options: bool) -> bool:
    os.close(open_folder(path, **options))
    return True


class TestFolders:
    def test_missing_folders_are_made_for_this_user_alone_with_any_umask(
        self, tmp_path: Path
    ) -> None:
        with umask(0o777):
            assert opens(tmp_path / "a" / "b" / "c")
        modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")]
        assert modes == [0o700] * 3

    def test_a_folder_of_ours_that_a_umask_has_closed_to_us_is_opened_again(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "a").mkdir(mode=0o600)
        assert opens(tmp_path / "a")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        ("mode", "told"), [(0o777, "every user"), (0o1777, "every user"), (0o702, "every user")]
    )
    def test_one_that_all_can_write_to_is_refused_with_the_way_out(
        self, tmp_path: Path, mode: int, told: str
    ) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a").chmod(mode)
        with pytest.raises(
            Unsafe,
            match=rf"{tmp_path}/a can be written to by {told} \(mode {mode:o}\); chmod it to 700",
        ):
            open_folder(tmp_path / "a")
        assert opens(tmp_path / "a", any_owner=True)

    @only_root
    def test_one_of_another_user_or_group_is_refused_with_the_way_out(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir(mode=0o755)
        os.chown(tmp_path / "a", NOBODY, 0)
        with pytest.raises(Unsafe, match=r"belongs to user nobody.*chown it to user root"):
            open_folder(tmp_path / "a")
        os.chown(tmp_path / "a", 0, NOBODY)
        (tmp_path / "a").chmod(0o775)
        with pytest.raises(Unsafe, match=r"written to by the group .*chmod g-w"):
            open_folder(tmp_path / "a")

    def test_one_that_others_could_exchange_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a").chmod(0o777)
        (tmp_path / "a" / "b").mkdir(mode=0o700)
        with pytest.raises(
            Unsafe, match=rf"{tmp_path}/a can be written to by every user, who could replace"
        ):
            open_folder(tmp_path / "a" / "b")
        (tmp_path / "a").chmod(0o1777)
        assert opens(tmp_path / "a" / "b"), "as in /tmp"

    def test_our_own_links_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "disk" / "x").mkdir(parents=True, mode=0o700)
        (tmp_path / "a").symlink_to(tmp_path / "disk")
        (tmp_path / "b").symlink_to("a/../disk/./x")
        assert opens(tmp_path / "b" / "y")
        assert (tmp_path / "disk" / "x" / "y").is_dir()
        (tmp_path / "round").symlink_to("round")
        with pytest.raises(OSError, match="symbolic links"):
            open_folder(tmp_path / "round")

    @only_root
    def test_links_of_others_are_not(self, tmp_path: Path) -> None:
        (tmp_path / "ours").mkdir(mode=0o700)
        (tmp_path / "planted").symlink_to(tmp_path / "ours")
        os.chown(tmp_path / "planted", NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(Unsafe, match=r"planted is a symbolic link of user nobody"):
            open_folder(tmp_path / "planted")

    def test_what_is_no_folder_is_an_error_and_leaves_no_descriptor(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(NotADirectoryError):
                open_folder(path)
        with pytest.raises(FileNotFoundError):
            open_folder(tmp_path / "missing", make=False)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestFiles:
    @pytest.mark.parametrize("kind", ["a link", "a hard link", "a pipe", "a socket", "a folder"])
    def test_only_a_regular_file_of_ours_with_one_name_is_opened(
        self, tmp_path: Path, kind: str
    ) -> None:
        precious, planted = tmp_path / "precious", tmp_path / "lock"
        precious.write_text("precious")
        match kind:
            case "a link":
                planted.symlink_to(precious)
            case "a hard link":
                planted.hardlink_to(precious)
            case "a pipe":
                os.mkfifo(planted)
            case "a socket":
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.bind(str(planted))
            case "a folder":
                planted.mkdir()
        folder = open_folder(tmp_path)
        with pytest.raises(
            OSError, match=r"symbolic link|not a regular file|another name|No such device|directory"
        ):
            open_own_file("lock", os.O_RDWR | os.O_CREAT, dir_fd=folder)
        os.close(folder)
        assert precious.read_text() == "precious"

    @only_root
    def test_a_file_of_another_user_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "lock").touch()
        os.chown(tmp_path / "lock", NOBODY, NOBODY)
        folder = open_folder(tmp_path)
        with pytest.raises(Unsafe, match=r"lock belongs to user nobody; remove it"):
            open_own_file("lock", os.O_RDWR, dir_fd=folder)
        os.close(folder)


class TestTiers:
    @pytest.mark.parametrize("tier_class", [DiskTier, SharedFilesTier])
    async def test_a_folder_that_others_can_write_to_holds_no_tier_unless_that_is_said(
        self, tmp_path: Path, tier_class: type[DiskTier | SharedFilesTier]
    ) -> None:
        place = tmp_path / "kv"
        place.mkdir()
        place.chmod(0o777)
        url = f"{tier_class.traits.name if tier_class is SharedFilesTier else 'disk'}://{place}?direct=never"
        tier = tier_class.from_url(parse_url(url))
        with pytest.raises(
            TierDenied, match=r"can be written to by every user .*chmod it to 700.*any_owner=true"
        ):
            await tier.check()
        assert list(place.iterdir()) == []
        await tier.close()
        tier = tier_class.from_url(parse_url(f"{url}&any_owner=true"))
        assert await store(tier, {make_key(1): b"x" * 100}) == [True]
        assert await fetch(tier, [make_key(1)], [100]) == [b"x" * 100]
        await tier.close()

    async def test_a_link_in_the_place_of_the_lock_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "kv").mkdir(mode=0o700)
        (tmp_path / "precious").write_text("precious")
        (tmp_path / "kv" / "kvhold.lock").hardlink_to(tmp_path / "precious")
        tier = DiskTier.from_url(parse_url(f"disk://{tmp_path}/kv"))
        with pytest.raises(TierDenied, match=r"kvhold\.lock has another name elsewhere"):
            await tier.check()
        await tier.close()
        assert (tmp_path / "precious").read_text() == "precious"

    async def test_the_folders_of_a_tier_are_its_users_alone_whatever_the_umask(
        self, tmp_path: Path
    ) -> None:
        with umask(0o177):
            tier = DiskTier.from_url(parse_url(f"disk://{tmp_path}/kv"))
            assert await store(tier, {make_key(1): b"x" * 100}) == [True]
            await tier.close()
        assert {
            path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*") if path.is_dir()
        } == {0o700}
