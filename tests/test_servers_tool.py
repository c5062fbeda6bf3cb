"""The tool that brings servers for tests: it finds what is missing, and installs nothing where it may not."""

import os
from pathlib import Path

import pytest

from tools.servers import PROGRAMS, may_install, missing_programs


def test_it_finds_what_is_missing(tmp_path: Path) -> None:
    assert missing_programs(str(tmp_path))[: len(PROGRAMS)] == list(PROGRAMS)
    program = tmp_path / "redis-server"
    program.write_text("")
    program.chmod(0o755)
    assert "redis-server" not in missing_programs(str(tmp_path))


def test_it_installs_nothing_where_it_was_told_not_to_or_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not may_install({"KVHOLD_SETUP_SERVERS": "0"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not may_install({})
