"""Containers of compose files and of pods, as processes: their command, variables, files and
probes, below a folder of the test, on loopback.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from tests.node.nodes import PATIENT_S, clean_environ

FOLDERS = ("/etc/kvhold", "/run/kvhold", "/var/lib/kvhold", "/var/cache/kvhold")


@dataclass(frozen=True)
class Container:
    """command: begins with kvhold
    files:   content by path
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


class Place:
    """Where containers have their folders, and which words mean something else here."""

    def __init__(self, folder: Path, words: Mapping[str, str]) -> None:
        """words: what stands in files, variables and commands -> what it is here"""
        self._folder = folder
        self._words = dict(words)

    def text(self, text: str, container: str) -> str:
        for word, here in self._words.items():
            text = text.replace(word, here)
        for path in FOLDERS:
            text = text.replace(path, str(self.path(path, container)))
        return text

    def path(self, path: str, container: str) -> Path:
        """Files in /etc/kvhold are each container's own."""
        for folder in FOLDERS:
            if path == folder or path.startswith(f"{folder}/"):
                own = f"{container}-etc" if folder == "/etc/kvhold" else folder.split("/")[-2]
                return self._folder / own / path.removeprefix(folder).lstrip("/")
        raise AssertionError(f"{path} is in no folder of kvhold's")

    def environ(self, container: Container) -> dict[str, str]:
        found = {name: self.text(text, container.name) for name, text in container.environ.items()}
        return clean_environ(**found)

    def write_files(self, container: Container) -> None:
        for path, content in container.files.items():
            file = self.path(path, container.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text(content, container.name))
            file.chmod(0o600)

    def probe(self, container: Container, command: Sequence[str]) -> tuple[int, str]:
        """The exit code, and what it says."""
        done = subprocess.run(
            _own(command),
            env=self.environ(container),
            capture_output=True,
            text=True,
            timeout=PATIENT_S,
        )
        return done.returncode, done.stdout + done.stderr

    @contextmanager
    def running(self, container: Container) -> Iterator[subprocess.Popen[str]]:
        """Until it says that it is ready, and then until the end of the block."""
        self.write_files(container)
        log = self._folder / f"{container.name}.log"
        with log.open("w") as file:
            process = _start(_own(container.command), self.environ(container), file)
        try:
            assert process.stdout is not None
            if "ready" not in process.stdout.readline():
                process.kill()
                pytest.fail(f"{container.name} did not start: {log.read_text()}")
            yield process
            process.terminate()
            assert process.wait(PATIENT_S) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        assert "Traceback" not in log.read_text(), log.read_text()


def _start(
    command: Sequence[str], environ: Mapping[str, str], log: IO[str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.PIPE, stderr=log, text=True
    )


def _own(command: Sequence[str]) -> list[str]:
    """The kvhold of this environment."""
    assert command[0] == "kvhold", command
    return [sys.executable, "-m", "kvhold", *command[1:]]
