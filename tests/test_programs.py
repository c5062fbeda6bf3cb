"""What brings servers for tests and benchmarks: it finds what is missing, and installs nothing
where it may not.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhold_lab.servers import programs
from kvhold_lab.servers.base import free_port
from kvhold_lab.servers.programs import PACKAGES, VERBS, may_install, missing, provide

_APT = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in *update) exit 0;; esac
[ -e {folder}/policy ] || exit 1
printf '#!/bin/sh\\n' > {folder}/redis-server && /bin/chmod 755 {folder}/redis-server
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of PATH; root's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVHOLD_SETUP_SERVERS", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(programs, "_POLICY", tmp_path / "policy")
    return tmp_path


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_it_finds_what_is_missing(folder: Path) -> None:
    wanted = [name for name in PACKAGES if name != VERBS]
    assert missing(wanted) == wanted
    program(folder, "redis-server")
    assert "redis-server" not in missing(wanted)
    assert missing(["libc.so.6", "libthat-nobody-has.so.1"]) == ["libthat-nobody-has.so.1"]


def test_it_installs_what_is_missing_and_no_service_starts(folder: Path) -> None:
    program(folder, "memcached")
    program(folder, "apt-get", _APT.format(folder=folder))
    said: list[str] = []
    provide(["redis-server", "memcached"], said.append)
    calls = (folder / "calls").read_text().splitlines()
    assert calls == ["--quiet update", "--quiet install --yes --no-install-recommends redis-server"]
    assert not (folder / "policy").exists()
    assert len(said) == 1 and said[0].startswith("installing redis-server ")
    provide(["redis-server", "memcached"], said.append)
    assert len(said) == 1


def test_it_says_why_an_installation_failed_and_what_is_missing_still(folder: Path) -> None:
    program(folder, "apt-get", "#!/bin/sh\necho no such mirror\nexit 100\n")
    said: list[str] = []
    provide(["redis-cli"], said.append)
    assert "apt-get update failed:\nno such mirror" in said[1]
    assert said[2].endswith("left out: redis-cli (apt-get install redis-tools)")


def test_it_installs_nothing_where_it_was_told_not_to_or_may_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not may_install({})  # no apt
    program(folder, "apt-get", _APT.format(folder=folder))
    assert may_install({})
    assert not may_install({"KVHOLD_SETUP_SERVERS": "0"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said: list[str] = []
    provide(["redis-server"], said.append)
    assert said == [
        "missing, and what needs it is left out: redis-server (apt-get install redis-server)"
    ]
    assert not (folder / "calls").exists()


def test_ports_may_be_asked_for_by_several_threads_at_once() -> None:
    """As servers do that start side by side.

    A generator, which has one caller, hands the numbers out.
    """
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            ports = list(threads.map(lambda _: free_port(), range(2000)))
    finally:
        sys.setswitchinterval(usual_s)
    assert len(set(ports)) == len(ports)
