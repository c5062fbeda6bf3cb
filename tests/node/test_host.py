"""A node belongs to its host: it keeps nothing of the engine that started it.

And its log stays bounded.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvhold.core.config import Config, EncryptionConfig, NodeConfig
from kvhold.core.errors import ConfigError
from kvhold.memory.placement import memory_nodes
from kvhold.node import NodeClient
from kvhold.node.host import node_environment
from kvhold.node.logs import RepeatFilter
from kvhold.node.server import Node
from kvhold.testing.cache import a_prompt
from tests.node.nodes import PATIENT, PATIENT_S, SPACE, clean_environ

# An engine as vLLM's worker on CPUs is, and worse: bound to one core and one NUMA node, nice, with
# blocked signals and open files.
ENGINE = """
import ctypes, os, resource, signal, sys
from pathlib import Path
from kvhold.memory import placement
from kvhold.node import connect
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
numa_node_0 = ctypes.byref(ctypes.c_ulong(1))
placement.system_call(placement._SET_MEMPOLICY, "set_mempolicy", 2, numa_node_0, 64)  # bind
os.nice(3)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.dup2(os.open("/proc/self/maps", os.O_RDONLY), 77, inheritable=True)
client = {"connect_timeout_s": 60, "call_timeout_s": 60}
with connect(ram_bytes="4MiB", node={"socket": sys.argv[1]}, client=client) as client:
    print(client.status()["pid"])
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[psutil.Process]:
    """A node that such an engine has started; the engine has ended."""
    path = tmp_path / "node.sock"
    environ = clean_environ(
        GOMP_CPU_AFFINITY="0",
        OMP_NUM_THREADS="1",
        MY_SECRET="engine's",
        AWS_REGION="here",
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    said = subprocess.run(
        [sys.executable, "-c", ENGINE, str(path)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=True,
    )
    node = psutil.Process(int(said.stdout))
    yield node
    with NodeClient(path, PATIENT, name="test") as client:
        client.stop_node()
    node.wait(timeout=PATIENT_S)


def test_a_node_keeps_nothing_of_the_engine_that_started_it(
    node: psutil.Process, tmp_path: Path
) -> None:
    proc = Path(f"/proc/{node.pid}")
    for task in proc.glob("task/*"):
        assert os.sched_getaffinity(int(task.name)) == os.sched_getaffinity(0), (
            "all cores of the control group"
        )
    assert os.sched_getscheduler(node.pid) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, node.pid) == (-5 if os.getuid() == 0 else 3)
    soft, hard = node.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard
    assert node.cwd() == "/"
    assert os.getsid(node.pid) != os.getsid(0)

    environ = node.environ()
    assert environ["AWS_REGION"] == "here"
    assert not {"GOMP_CPU_AFFINITY", "OMP_NUM_THREADS", "MY_SECRET", "LD_PRELOAD"} & environ.keys()

    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    blocked, ignored = int(status["SigBlk"], 16), int(status["SigIgn"], 16)
    assert not blocked & 1 << signal.SIGTERM - 1
    assert not ignored & 1 << signal.SIGINT - 1
    assert not any(
        file.path == f"/proc/{node.pid}/maps" or file.fd == 77 for file in node.open_files()
    )


@pytest.mark.skipif(not memory_nodes(), reason="Linux does not say which NUMA nodes have memory")
def test_a_node_has_the_default_memory_policy_and_so_has_its_arena(node: psutil.Process) -> None:
    lines = Path(f"/proc/{node.pid}/numa_maps").read_text().splitlines()
    arena = next(line.split()[1] for line in lines if "kvhold-arena" in line)
    assert arena.startswith("interleave:") if len(memory_nodes()) > 1 else arena == "default"
    assert not any(line.split()[1].startswith("bind") for line in lines)


def test_a_node_is_given_a_written_list_of_variables_and_those_that_settings_name() -> None:
    environ = {
        "PATH": "/bin",
        "LD_PRELOAD": "x",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "KEY": "k",
        "MINE": "m",
        "LC_ALL": "C",
    }
    config = Config(
        encryption=EncryptionConfig(keys=("acme=env:KEY",)), node=NodeConfig(environment=("MINE",))
    )
    assert node_environment(environ, config).keys() == {"PATH", "KEY", "MINE", "LC_ALL"}


def test_chunks_lie_near_the_device_that_stores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This host may have one NUMA node: the second one here has no memory."""
    monkeypatch.setattr("kvhold.node.server.memory_nodes", lambda: [0, 1])
    config = Config(ram_bytes=8 << 20, node=NodeConfig(socket=str(tmp_path / "s"), numa="near"))
    zones: dict[int, set[int]] = {}

    def ready(node: Node) -> None:
        node.state.register(SPACE.layout)
        for numa_node in (1, 0, 5):
            node.state.place_near("rank", numa_node)
            names = a_prompt(SPACE, 64, numa_node).chunks()
            granted = node.state.reserve("rank", SPACE.layout, names, 0)
            zones[numa_node] = {offset // (4 << 20) for offset in granted.offsets[0]}
        node.stop()

    asyncio.run(Node(config).serve(on_ready=ready))
    assert (zones[0], zones[1]) == ({0}, {1})
    assert zones[5] <= {0, 1}
    assert 1 in memory_nodes() or "on NUMA node 1" in caplog.text


@pytest.mark.parametrize("numa", ["all", "0,x", "1023"])
def test_numa_nodes_that_are_not_there_are_refused_with_those_that_are(
    tmp_path: Path, numa: str
) -> None:
    with pytest.raises(ConfigError, match=r"node\.numa = "):
        Node(Config(ram_bytes=4 << 20, node=NodeConfig(socket=str(tmp_path / "s"), numa=numa)))


# Its log

LOGGING = """
import logging, os, sys
from pathlib import Path
from kvhold.node.logs import write_log
write_log(Path(sys.argv[1]), max_bytes=4096, files=3)
for number in range(20):
    line = f"logging.getLogger('x').warning('line {number} ' + 'x' * 400)"
    exec(compile(line, f"file{number}", "exec"))
for number in range(50):
    logging.getLogger("x").warning("the same place, %d", number)
os.write(2, b"printed by a library\\n")
"""


def test_a_log_is_rotated_and_what_is_printed_goes_to_its_newest_file(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    subprocess.run(
        [sys.executable, "-c", LOGGING, str(log)],
        env=clean_environ(PYTHONPATH=os.pathsep.join(sys.path)),
        check=True,
    )
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["node.log", "node.log.1", "node.log.2"]
    assert all(file.stat().st_size <= 4096 + len("printed by a library\n") for file in files)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert log.read_text().endswith("printed by a library\n")
    assert log.read_text().count("the same place") == 20


def test_a_log_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "node.log").symlink_to(tmp_path / "precious")
    command = [sys.executable, "-c", LOGGING, str(tmp_path / "node.log")]
    done = subprocess.run(
        command,
        env=clean_environ(PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert (tmp_path / "precious").read_text() == "precious"


def test_lines_that_were_held_back_are_counted_in_the_next_one() -> None:
    now = [0.0]
    repeats = RepeatFilter(clock=lambda: now[0])

    def line() -> logging.LogRecord:
        return logging.LogRecord("x", logging.WARNING, "file.py", 7, "refused %s", ("a",), None)

    assert [repeats.filter(line()) for _ in range(100)] == [True] * 20 + [False] * 80
    now[0] = 61.0
    last = line()
    assert repeats.filter(last)
    assert last.getMessage() == "refused a (80 more such lines in the last 61 s)"


# Its socket


def test_listening_never_changes_the_modes_of_files_that_others_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask belongs to the process: a change of it, however short, shapes the folders that
    other threads make meanwhile.
    """
    calls: list[int] = []

    def umask(mask: int) -> int:
        calls.append(mask)
        return 0o022

    monkeypatch.setattr(os, "umask", umask)

    async def listen() -> int:
        node = Node(Config(ram_bytes=4 << 20, node=NodeConfig(socket=str(tmp_path / "s"))))
        mode: list[int] = []

        def ready(node: Node) -> None:
            (tmp_path / "folder").mkdir()
            mode.append(node.path.stat().st_mode & 0o777)
            node.stop()

        await node.serve(on_ready=ready)
        return mode[0]

    assert asyncio.run(listen()) == 0o600
    assert calls == []
    assert (tmp_path / "folder").stat().st_mode & 0o700 == 0o700


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12), reason="slices need Linux 6.12"
)
def test_the_loop_takes_short_slices_and_keeps_its_nice_value() -> None:
    script = (
        "import os; nice = os.nice(1)\n"
        "from kvhold.node.host import run_when_woken\n"
        "run_when_woken()\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0) == nice, os.sched_getscheduler(0))\n"
        "print(open('/proc/self/sched').read())\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert answer[0] == f"True {os.SCHED_OTHER}"
    [line] = [line for line in answer if line.startswith("se.slice")]
    assert float(line.split(":")[1]) < 1_000_000
