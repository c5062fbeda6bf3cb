"""Remove from a detached node the process settings that it inherited from the engine that started
it.

    environ = node_environment(os.environ, config)     # for the process that is spawned
    belong_to_host(keep=(pipe,))  # in that process, before it makes threads, files or memory
    raise_priority(config.node.nice)

An engine may pin itself to a few cores and to the memory of one NUMA node, run with another
priority, and preload its own libraries. A child process inherits these settings. A node that kept
them would compete with the engine's spinning threads for its cores. Nothing here raises: if the
host refuses a change, the node is slower, not wrong.
"""

import logging
import os
import re
import resource
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvhold.core.config import Config
from kvhold.core.secrets import referenced_variables
from kvhold.memory import placement

log = logging.getLogger(__name__)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}

# The variables that a node takes over from the engine that starts it, each with its reason. It
# takes no others: not the engine's LD_PRELOAD, thread bindings (OMP_*, GOMP_*, KMP_*), devices and
# settings.
_KEPT = {
    r"PATH|HOME|USER|LOGNAME|SHELL": "who and where the user is",
    r"LANG|LANGUAGE|LC_\w+|TZ": "the language and time zone of messages and logs",
    r"XDG_\w+|TMPDIR": "where the socket and the caches of libraries lie",
    r"PYTHON(PATH|HOME|UTF8|HASHSEED|WARNINGS)": "the same interpreter and packages",
    r"PYTHON(DONTWRITEBYTECODE|PYCACHEPREFIX|FAULTHANDLER)": "the same interpreter and packages",
    r"VIRTUAL_ENV|CONDA_\w+|LD_LIBRARY_PATH": "the libraries of that interpreter",
    r"NUMBA_CACHE_DIR": "where compiled codecs are kept",
    r"KVHOLD_LOG_LEVEL": "how much the node logs",
    r"AWS_\w+|GOOGLE_\w+|AZURE_\w+": "credentials and addresses of object stores",
    r"(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy": "the way to object stores",
    r"SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE": "whom TLS trusts",
    r"MC_\w+|MOONCAKE_\w+|UCX_\w+|IBV_\w+": "the networks of Mooncake and InfiniStore",
    r"KUBERNETES_SERVICE_(HOST|PORT)": "credentials of a pod's service account",
    r"COVERAGE_\w+": "measuring which lines run",
}
_KEPT_NAME = re.compile("|".join(f"(?:{names})" for names in _KEPT))


def node_environment(environ: Mapping[str, str], config: Config) -> dict[str, str]:
    """Return the variables of this environment that a new node gets.

    The caller adds the node's settings.

    Kept are `_KEPT`, the names in `node.environment`, and the variables that settings refer to for
    secrets and encryption keys.
    """
    named = set(config.node.environment) | referenced_variables(
        (*config.tiers, *config.encryption.keys)
    )
    return {
        name: value
        for name, value in environ.items()
        if name in named or _KEPT_NAME.fullmatch(name)
    }


def spawn_attributes() -> dict[str, Any]:
    """Return arguments for `os.posix_spawn`: a new session, no signal blocked or ignored."""
    usual = [
        number
        for number in signal.valid_signals()
        if number not in (signal.SIGKILL, signal.SIGSTOP)
    ]
    return {"setsid": True, "setsigmask": [], "setsigdef": usual}


def belong_to_host(keep: Iterable[int] = ()) -> None:
    """Reset this process's inherited cores, memory policy, scheduling, descriptor limit and working
    folder.

    Closes all descriptors except 0-2 and `keep`. Call it before the process has other threads and
    maps memory: later threads inherit these settings.
    """
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _most_descriptors())
    os.chdir("/")
    placement.take_all_cores()
    placement.set_default_memory_policy()
    _reset_scheduling()
    raise_descriptor_limit()


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors to the most that this user may have.

    Returns the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def raise_priority(nice: int) -> None:
    """Set the nice value of this process, and of its session's autogroup if Linux has one.

    Changes nothing if the host refuses.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        log.debug("the nice value stays %d: %s", os.getpriority(os.PRIO_PROCESS, 0), error)
        return
    with suppress(OSError):  # absent, or another user's
        Path("/proc/self/autogroup").write_text(str(nice))


def _reset_scheduling() -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    # an ordinary user may not lower the nice value that an engine was given
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    # of this process: the default, by its nice value
    placement.system_call(_IOPRIO_SET, "ioprio_set", 1, 0, 0)


def _most_descriptors() -> int:
    """Return one more than the largest descriptor that may be open."""
    try:
        return 1 + max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    except (OSError, ValueError):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
