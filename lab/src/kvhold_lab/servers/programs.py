"""Installs missing servers with apt, as root, unless KVHOLD_SETUP_SERVERS=0. Starts none."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

from kvhold_lab.servers.helm import provide_helm

VERBS = "libibverbs.so.1"  # of Mooncake's client and LMCache, even without RDMA
PACKAGES = {  # program or library -> Debian package
    "redis-server": "redis-server",
    "redis-sentinel": "redis-sentinel",
    "redis-cli": "redis-tools",
    "memcached": "memcached",
    "openssl": "openssl",
    "etcd": "etcd-server",
    "nats-server": "nats-server",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "systemd-analyze": "systemd",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "g++": "g++",
    VERBS: "libibverbs1",
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
    "ceph": "ceph-common",
}
_POLICY = Path("/usr/sbin/policy-rc.d")  # exit status 101 keeps services off


def main() -> None:
    if not missing(PACKAGES):
        click.echo("servers for tests: all there")
    provide(PACKAGES, click.echo)
    provide_helm(click.echo)


def provide(wanted: Iterable[str], say: Callable[[str], None]) -> None:
    lacking = missing(wanted)
    if lacking and may_install(os.environ):
        say(f"installing {_packages(lacking)} (KVHOLD_SETUP_SERVERS=0 leaves them out) ...")
        packages = _packages(lacking).split()
        if failure := _install(packages):
            say(failure)
            for package in packages if len(packages) > 1 else ():
                _install([package])
        lacking = missing(lacking)
    if lacking:
        say(
            f"missing, and what needs it is left out: {', '.join(lacking)} (apt-get "
            f"install {_packages(lacking)})"
        )


def missing(wanted: Iterable[str]) -> list[str]:
    return [name for name in wanted if not (_loads(name) if ".so" in name else shutil.which(name))]


def may_install(environ: Mapping[str, str]) -> bool:
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
