"""Ends the workers of pytest-xdist when none has reported for long: what hangs between two tests,
or has taken a test's timer, has no limit of its own. The tests that ran are named as crashed.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

SILENT_S = 1200.0  # the longest tests take minutes
_PART = 0.05


def hands_out_tests(config: pytest.Config) -> bool:
    is_worker = hasattr(config, "workerinput")
    return config.getoption("dist", "no") != "no" and not is_worker


class SilenceWatch:
    """A plugin of the process that hands out the tests."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._pids: dict[Any, int] = {}
        self._since_s = time.monotonic()
        self._is_over = threading.Event()

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        self._since_s = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="silence").start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        self._pids[node] = node.gateway._io.popen.pid  # no public name

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._pids.pop(node, None)
        self._since_s = time.monotonic()

    @pytest.hookimpl
    def pytest_runtest_logreport(self) -> None:
        self._since_s = time.monotonic()

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(self._silent_s * _PART):
            if time.monotonic() - self._since_s < self._silent_s:
                continue
            self._since_s = time.monotonic()
            print(f"\nno test has ended for {self._silent_s:g} s: workers are ended", flush=True)
            for pid in list(self._pids.values()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler prints what each thread does
