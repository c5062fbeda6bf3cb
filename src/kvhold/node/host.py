"""Free a detached node from its engine's process settings (docs/node.md).

A refused change only makes the node slower.
"""

import ctypes
import logging
import os
import re
import resource
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

from kvhold.core.config import Config
from kvhold.core.secrets import referenced_variables
from kvhold.memory import placement

log = logging.getLogger(__name__)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}
_SCHED_ATTRIBUTES = Struct("IIQiIQQQ")
_SLICE_NS = 100_000  # Linux's least

_KEPT = {
    r"PATH|HOME|USER|LOGNAME|SHELL": "the user's name and home",
    r"LANG|LANGUAGE|LC_\w+|TZ": "the language and time zone of messages and logs",
    r"XDG_\w+|TMPDIR": "where the socket and the caches of libraries lie",
    r"PYTHON(PATH|HOME|UTF8|HASHSEED|WARNINGS)": "the same interpreter and packages",
    r"PYTHON(DONTWRITEBYTECODE|PYCACHEPREFIX|FAULTHANDLER)": "the same interpreter and packages",
    r"VIRTUAL_ENV|CONDA_\w+|LD_LIBRARY_PATH": "the libraries of that interpreter",
    r"NUMBA_CACHE_DIR": "where compiled codecs are kept",
    r"KVHOLD_LOG_LEVEL": "how much the node logs",
    r"AWS_\w+|GOOGLE_\w+|AZURE_\w+": "credentials and addresses of object stores",
    r"(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy": "the way to object stores",
    r"SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE": "the certificates that TLS trusts",
    r"MC_\w+|MOONCAKE_\w+|NIXL_\w+|UCX_\w+|IBV_\w+": "the networks of Mooncake, InfiniStore, NIXL",
    r"KUBERNETES_SERVICE_(HOST|PORT)": "credentials of a pod's service account",
    r"COVERAGE_\w+": "coverage in child processes",
}
_KEPT_NAME = re.compile("|".join(f"(?:{names})" for names in _KEPT))


def node_environment(environ: Mapping[str, str], config: Config) -> dict[str, str]:
    named = set(config.node.environment) | referenced_variables(
        (*config.tiers, *config.encryption.keys)
    )
    return {
        name: value
        for name, value in environ.items()
        if name in named or _KEPT_NAME.fullmatch(name)
    }


def spawn_attributes() -> dict[str, Any]:
    """Begin a new session; block and ignore no signal."""
    usual = [
        number
        for number in signal.valid_signals()
        if number not in (signal.SIGKILL, signal.SIGSTOP)
    ]
    return {"setsid": True, "setsigmask": [], "setsigdef": usual}


def belong_to_host(keep: Iterable[int] = ()) -> None:
    """Reset cores, memory policy, scheduling, descriptor limit and folder; close descriptors.

    Call it before any thread starts and before memory is mapped.
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def raise_priority(nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        log.debug("the nice value stays %d: %s", os.getpriority(os.PRIO_PROCESS, 0), error)
        return
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def run_when_woken() -> None:
    """Take short slices, with Linux 6.12. For this thread and those that it starts later."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTRIBUTES.pack(
        _SCHED_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0
    )
    buffer = ctypes.create_string_buffer(attributes)
    placement.system_call(_SCHED_SETATTR, "sched_setattr", 0, buffer, 0)


def _reset_scheduling() -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    placement.system_call(_IOPRIO_SET, "ioprio_set", 1, 0, 0)


def _most_descriptors() -> int:
    try:
        return 1 + max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    except (OSError, ValueError):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
