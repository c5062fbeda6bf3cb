"""Looks for the real servers that tests of tiers start, and installs those that are missing where it may.

    python3 tools/servers.py             # what `make test` runs first

As root on Debian or Ubuntu the missing ones are installed by apt; elsewhere it says which are missing and that their tests are skipped.
KVHOLD_SETUP_SERVERS=0 installs nothing. No service is started: tests start their own, on free loopback ports.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = {  # program -> Debian's package
    "redis-server": "redis-server",
    "redis-sentinel": "redis-sentinel",
    "redis-cli": "redis-tools",
    "memcached": "memcached",
    "openssl": "openssl",
}
LIBRARIES = {"libibverbs.so.1": "libibverbs1"}  # what Mooncake's client loads, without any RDMA device
_POLICY = Path("/usr/sbin/policy-rc.d")  # where it exists and says 101, packages start no service


def main() -> None:
    missing = missing_programs(os.environ.get("PATH", ""))
    if not missing:
        print("servers for tests: all there")
        return
    if may_install(os.environ):
        failure = install(sorted({(PROGRAMS | LIBRARIES)[name] for name in missing}))
        if failure:
            print(failure, file=sys.stderr)
        missing = missing_programs(os.environ.get("PATH", ""))
    if missing:
        packages = " ".join(sorted({(PROGRAMS | LIBRARIES)[name] for name in missing}))
        print(f"servers for tests: without {', '.join(missing)}; their tests are skipped (apt-get install {packages})")
    else:
        print("servers for tests: installed")


def missing_programs(path: str) -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None] + [name for name in LIBRARIES if not _loads(name)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def may_install(environ: Mapping[str, str]) -> bool:
    return environ.get("KVHOLD_SETUP_SERVERS", "") != "0" and os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: list[str]) -> str:
    """Install them; what went wrong, if something did. Their services stay off."""
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
