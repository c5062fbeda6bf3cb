"""Looks for the real servers that tests and benchmarks start, and installs those that are missing
where it may.

    python -m kvhold.testing.servers.programs    # what `make test` runs first
    provide(["redis-server"], say=click.echo)    # what a benchmark calls

As root on Debian or Ubuntu the missing ones are installed by apt; elsewhere it says which are
missing and how they come. KVHOLD_SETUP_SERVERS=0 installs nothing. No service is started: tests and
benchmarks start their own, on free loopback ports.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

VERBS = "libibverbs.so.1"  # Mooncake's client and LMCache load it, without any RDMA device
PACKAGES = {  # program or library -> Debian's package
    "redis-server": "redis-server",
    "redis-sentinel": "redis-sentinel",
    "redis-cli": "redis-tools",
    "memcached": "memcached",
    "openssl": "openssl",
    VERBS: "libibverbs1",
}
_POLICY = Path("/usr/sbin/policy-rc.d")  # where it exists and says 101, packages start no service


def main() -> None:
    """All of them, for tests."""
    if not missing(PACKAGES):
        click.echo("servers for tests: all there")
    provide(PACKAGES, click.echo)


def provide(wanted: Iterable[str], say: Callable[[str], None]) -> None:
    """Install what is missing of these programs and libraries, where that may be; `say` is told
    what is done, and what is missing still.
    """
    lacking = missing(wanted)
    if lacking and may_install(os.environ):
        say(f"installing {_packages(lacking)} (KVHOLD_SETUP_SERVERS=0 leaves them out) ...")
        if failure := _install(_packages(lacking).split()):
            say(failure)
        lacking = missing(lacking)
    if lacking:
        say(
            f"missing, and what needs it is left out: {', '.join(lacking)} (apt-get "
            f"install {_packages(lacking)})"
        )


def missing(wanted: Iterable[str]) -> list[str]:
    """Those of these programs and libraries that are not on this machine."""
    return [name for name in wanted if not (_loads(name) if ".so" in name else shutil.which(name))]


def may_install(environ: Mapping[str, str]) -> bool:
    """Whether packages may be installed here: by root, with apt, and not switched off."""
    return (
        environ.get("KVHOLD_SETUP_SERVERS", "") != "0"
        and os.geteuid() == 0
        and shutil.which("apt-get") is not None
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _packages(names: Iterable[str]) -> str:
    return " ".join(sorted({PACKAGES[name] for name in names}))


def _install(packages: list[str]) -> str:
    """What went wrong, if something did. Their services stay off."""
    made = not _POLICY.exists()
    if made:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "--quiet", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
            if done.returncode:
                return f"apt-get {' '.join(command)} failed:\n{done.stdout[-2000:]}"
        return ""
    finally:
        if made:
            _POLICY.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
