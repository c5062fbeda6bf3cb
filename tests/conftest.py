"""What every test shares: no telemetry, hypothesis without deadlines, `vllm` tests that step aside
where there is no vLLM, and files that are left alone where all of their tests are deselected.
"""

import importlib.util
import logging
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvhold_lab.engines.preloaded import VARIABLE, preloading
from tests.forks import forking
from tests.measuring import Measuring, measured
from tests.programs import BROUGHT_BY
from tests.silence import SilenceWatch, hands_out_tests

# Files whose tests are long and share nothing.
SPREAD_FILES = ("tests/lab/simulation/test_simulation.py",)
# Files that take a minute or more, the longest first, and those that take longer than their marks
# say. They begin first: at the end one would run alone.
LONG_FILES = (
    "tests/vllm/test_reuse.py",
    "tests/vllm/test_codecs.py",
    "tests/vllm/test_verify.py",
    "tests/vllm/test_verify_damage.py",
    "tests/lab/bench/load/test_real_server.py",
    "tests/vllm/test_mini_engine.py",
    "tests/vllm/test_naming_engines.py",
    "tests/examples/test_two_vllm_engines.py",
    "tests/vllm/test_two_servers.py",
    "tests/vllm/test_adapter_engine.py",
    "tests/vllm/test_computing_once_servers.py",
    "tests/vllm/test_span_hosts.py",
    "tests/vllm/test_two_hosts.py",
    "tests/vllm/test_engine_driver.py",
    "tests/vllm/test_worker_device.py",
    "tests/lab/engines/test_preloaded.py",
    "tests/vllm/test_requests_soak.py",
    "tests/memory/test_device_mutations.py",
    "tests/lab/bench/test_gpu.py",
    "tests/lab/simulation/test_simulation.py",
    "tests/codecs/test_quantised.py",
    "tests/test_distributions.py",
    "tests/lab/bench/test_tiers.py",
    "tests/node/test_peer_nodes.py",
    "tests/lab/demo/test_demo.py",
    "tests/lab/bench/test_peers.py",
    "tests/lab/bench/test_quality.py",
    "tests/tiers/test_s3.py",
    "tests/tiers/test_disk_crash.py",
    "tests/lab/bench/test_micro.py",
    "tests/tiers/test_learned.py",
    "tests/cache/test_state.py",
    "tests/cache/test_searches_in_any_order.py",
    "tests/lab/bench/test_overload.py",
    "tests/test_run_tests.py",
    "tests/tiers/test_disk_account.py",
)

MEASURING = pytest.StashKey[Measuring | None]()
UNTIL_THE_END = pytest.StashKey[ExitStack]()

# Inherited by every server a test starts: nothing asks a hub, nothing reports home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

settings.register_profile("dev", deadline=None)
# Shared cores make health checks and deadlines lie; the same examples in every run make a red build
# reproducible.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    """Give nodes a state folder of the tests' own. Fork kvhold and engines from processes that have
    made the imports, which are most of a start.
    """
    if hands_out_tests(config):
        config.pluginmanager.register(SilenceWatch())
    measurement = measured()
    config.stash[MEASURING] = Measuring(measurement) if measurement is not None else None
    config.stash[UNTIL_THE_END] = until_the_end = ExitStack()
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(until_the_end.enter_context(preloading()))
        until_the_end.callback(os.environ.pop, VARIABLE)
    until_the_end.enter_context(forking())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="kvhold-tests-state-")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[UNTIL_THE_END].close()
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has nothing for this stage (`-m 'not vllm ...'`, `-m vllm`) is not even imported:
    an engine takes ten seconds.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    source = collection_path.read_text()
    for term in config.option.markexpr.split(" and "):
        if (plain := re.fullmatch(r"(not )?(\w+)", term)) is None:
            continue
        unwanted, mark = plain[1], rf"\bpytest\.mark\.{plain[2]}\b"
        has_it, is_all_of_it = (
            re.search(mark, source),
            re.search(rf"^pytestmark = (?:\[[^\]]*|.*){mark}", source, re.MULTILINE),
        )
        if is_all_of_it if unwanted else not has_it:
            return True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, then those that look long."""
    costs = Counter[str]()
    for item in items:
        costs[_file(item.nodeid)] += _cost(item)
    ranks = {file: rank - len(LONG_FILES) for rank, file in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (ranks.get(file := _file(item.nodeid), 0), -costs[file], file))
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="no vLLM in this environment"))


def _cost(item: pytest.Item) -> int:
    """About 20 a second."""
    marks = {mark.name for mark in item.iter_markers()}
    return 200 if "slow" in marks else 20 if marks & {"server", "vllm"} else 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where lines are measured, those of a test's first part."""
    measuring = item.config.stash[MEASURING]
    if measuring is None:
        return (yield)
    measuring.begin()
    try:
        return (yield)
    finally:
        measuring.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """A changed logger hides the warnings that later tests look for."""
    result = yield
    if item.get_closest_marker("vllm") is None:  # the connector logs like vLLM
        assert _changed_loggers() == []
    return result


def _changed_loggers() -> list[logging.Logger]:
    return [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.split(".")[0] == "kvhold" and isinstance(logger, logging.Logger)
        if (logger.level, logger.propagate, logger.disabled) != (logging.NOTSET, True, False)
    ]


@pytest.fixture
def unmeasured_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """For long tests whose child processes run what other tests measure, or a copy of the code."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture
def executed() -> Iterator[None]:
    """`kvhold` is started as a user does it, and not forked (`tests.forks`)."""
    with forking(allowed=False):
        yield


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but in the order of collection, and the tests of `SPREAD_FILES` go to
    any worker.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = _file(nodeid)
            return nodeid if file in SPREAD_FILES else file

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _file(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in one line which programs were missing, and how many tests were skipped for that."""
    for program, count in sorted(_missing_programs(terminalreporter).items()):
        terminalreporter.write_line(f"NOT INSTALLED: {program}: {count} tests were skipped")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    _save_coverage(session.config)
    _require_programs(session)


def _save_coverage(config: pytest.Config) -> None:
    """Where lines are measured: xdist kills a worker that does not end within ten seconds."""
    measurement, measuring = measured(), config.stash[MEASURING]
    if measurement is not None and measuring is not None:
        measuring.close()
        measurement.save()


def _require_programs(session: pytest.Session) -> None:
    """In CI a program that CI installs may not be missing, but before it installs them."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    has_servers = "not server" not in session.config.option.markexpr
    if os.environ.get("CI") and has_servers and reporter is not None:
        lacking = _missing_programs(reporter).keys() & BROUGHT_BY.keys()
        if lacking:
            reporter.write_line(f"CI installs {', '.join(sorted(lacking))}, and it is missing")
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _missing_programs(reporter: Any) -> Counter[str]:
    reasons = (
        str(report.longrepr[2])
        for report in reporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    found = (re.search(r"(\S+) is not installed here", reason) for reason in reasons)
    return Counter(match[1] for match in found if match is not None)
