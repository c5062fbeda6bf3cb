"""Redis servers: one, a cluster, or a primary, a replica and sentinels."""

import secrets
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvhold_lab.servers.base import ServerProcess, free_port, program

_FORM_S = 120.0
_POLL_S = 0.02
_CALL_S = 60.0
_CALM_MS, _QUICK_MS = 60_000, 500


class ReplyError(Exception): ...


class RedisServer(ServerProcess):
    """unix:     also listen on `unix_path`
    users:    ACL users, such as "ann on >secret ~kvhold:* +@all"
    tls:      TLS only, with client certificates: `ca_file`, `client_file`
    settings: for redis.conf
    """

    def __init__(
        self,
        *,
        unix: bool = False,
        password: str = "",
        users: Sequence[str] = (),
        tls: bool = False,
        settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._unix = unix
        self._password = password
        self._users = users
        self._tls = tls
        self._settings = settings or {}

    @property
    def unix_path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def client_file(self) -> Path:
        return self.folder / "client.pem"

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        if self._tls:
            return f"rediss://{credentials}127.0.0.1:{self.port}/0?ca_file={self.ca_file}&cert_file={self.client_file}"
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    def call(self, *words: str | bytes | int) -> Any:
        with socket.create_connection(("127.0.0.1", self.port), timeout=_CALL_S) as plain:
            if not self._tls:
                return self._call_over(plain, words)
            context = ssl.create_default_context(cafile=str(self.ca_file))
            context.load_cert_chain(self.client_file)
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
                return self._call_over(secured, words)

    def answers(self) -> bool:
        return bool(self.call("PING") == b"PONG")

    def command(self) -> Sequence[str]:
        executable = program("redis-server", "apt-get install redis-server")
        listen = (
            {"tls-port": str(self.port), "port": "0"} if self._tls else {"port": str(self.port)}
        )
        settings = (
            {"bind": "127.0.0.1", "save": '""', "appendonly": "no", "dir": str(self.folder)}
            | listen
            | self._settings
        )
        if self._tls:
            if not self.ca_file.exists():
                make_certificates(self.folder)
            own = str(self.folder / "server.pem")
            settings |= {
                "tls-ca-cert-file": str(self.ca_file),
                "tls-cert-file": own,
                "tls-key-file": own,
            }
        if self._unix:
            settings["unixsocket"] = str(self.unix_path)
        if self._password:
            settings["requirepass"] = self._password
        lines = [f"{name} {value}" for name, value in settings.items()] + [
            f"user {user}" for user in self._users
        ]
        file = self.folder / "redis.conf"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [executable, str(file)]

    def _call_over(self, sock: socket.socket, words: Sequence[str | bytes | int]) -> Any:
        with sock.makefile("rwb") as stream:
            if self._password:
                _send_command(stream, ("AUTH", self._password))
            return _send_command(stream, words)


class RedisCluster:
    """Three primaries. A failure is noticed after a minute."""

    def __init__(self) -> None:
        self._buses = [free_port() for _ in range(3)]
        self.nodes = [RedisServer(settings=_cluster_settings(bus)) for bus in self._buses]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def owner(self, slot: int) -> RedisServer:
        for first, last, (_, port, *_), *_ in self.nodes[0].call("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(f"no node of the cluster serves slot {slot}")

    def assign(self, slot: int, to: RedisServer) -> None:
        name = to.call("CLUSTER", "MYID")
        for node in (to, *(node for node in self.nodes if node is not to)):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", name)

    def close(self) -> None:
        self._stack.close()
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                self._stack.enter_context(node)
            self._form()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _form(self) -> None:
        bounds = [0, 5461, 10923, 16384]
        for i, node in enumerate(self.nodes):
            node.call("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            node.call("CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            self.nodes[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node in self.nodes:
            wait_for(partial(_serves, node))


class RedisSentinels:
    """Three sentinels watch a primary and a replica as `service`.

    Failover begins after a minute of silence, or with `be_quick` after half a second.
    """

    service = "held"

    def __init__(self) -> None:
        self.primary = RedisServer()
        self.replica = RedisServer(
            settings={
                "replicaof": f"127.0.0.1 {self.primary.port}",
                "repl-diskless-sync-delay": "0",
            }
        )
        self.sentinels = [
            _Sentinel(self.service, self.primary.port, self.replica.port) for _ in range(3)
        ]
        for sentinel in self.sentinels:
            sentinel.introduce(self.sentinels)
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return (
            "redis-sentinel://"
            + ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
            + f"/0?service={self.service}"
        )

    def be_quick(self) -> None:
        for sentinel in self.sentinels:
            sentinel.call("SENTINEL", "SET", self.service, "down-after-milliseconds", _QUICK_MS)

    def wait_until_primary(self, server: RedisServer) -> None:
        for sentinel in self.sentinels:
            if sentinel.running:
                wait_for(partial(self._names, sentinel, server))
        wait_for(lambda: server.call("ROLE")[0] == b"master")

    def _names(self, sentinel: RedisServer, server: RedisServer) -> bool:
        return bool(
            sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)[1]
            == b"%d" % server.port
        )

    def _is_set(self, sentinel: RedisServer) -> bool:
        facts = _facts(sentinel.call("SENTINEL", "MASTER", self.service))
        (replica,) = [_facts(each) for each in sentinel.call("SENTINEL", "REPLICAS", self.service)]
        return (
            facts[b"num-other-sentinels"] == b"2"
            and facts[b"flags"] == b"master"
            and replica[b"flags"] == b"slave"
            and replica[b"master-link-status"] == b"ok"
        )

    def close(self) -> None:
        self._stack.close()
        for server in (self.primary, self.replica, *self.sentinels):
            server.close()

    def __enter__(self) -> Self:
        try:
            for server in (self.primary, self.replica):
                self._stack.enter_context(server)
            wait_for(lambda: self.replica.call("ROLE")[3] == b"connected")
            for sentinel in self.sentinels:
                self._stack.enter_context(sentinel)
            for sentinel in self.sentinels:
                wait_for(partial(self._is_set, sentinel))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Sentinel(RedisServer):
    def __init__(self, service: str, primary: int, replica: int) -> None:
        super().__init__()
        self.name = secrets.token_hex(20)
        self._service = service
        self._lines = [
            f"sentinel myid {self.name}",
            f"sentinel monitor {service} 127.0.0.1 {primary} 2",
            f"sentinel down-after-milliseconds {service} {_CALM_MS}",
            f"sentinel failover-timeout {service} 2000",
            f"sentinel known-replica {service} 127.0.0.1 {replica}",
        ]

    def introduce(self, sentinels: Sequence["_Sentinel"]) -> None:
        others = [sentinel for sentinel in sentinels if sentinel is not self]
        self._lines += [
            f"sentinel known-sentinel {self._service} 127.0.0.1 {other.port} {other.name}"
            for other in others
        ]

    def command(self) -> Sequence[str]:
        executable = program("redis-sentinel", "apt-get install redis-sentinel")
        file = self.folder / "sentinel.conf"
        file.write_text(
            "\n".join((f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", *self._lines))
            + "\n",
            encoding="utf-8",
        )
        return [executable, str(file)]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _FORM_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("a server did not do what was waited for")
        time.sleep(_POLL_S)


def make_certificates(folder: Path) -> None:
    openssl = program("openssl", "apt-get install openssl")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    authority = ("-CA", "ca.pem", "-CAkey", "ca.key")
    commands = [
        [
            openssl,
            "req",
            "-x509",
            *key,
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-subj",
            "/CN=kvhold test authority",
        ]
    ]
    for name in ("server", "client"):
        subject = (
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        )
        commands.append(
            [
                openssl,
                "req",
                "-x509",
                *authority,
                *key,
                "-keyout",
                f"{name}.key",
                "-out",
                f"{name}.crt",
                *subject,
            ]
        )
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    for name in ("server", "client"):
        pair = [(folder / f"{name}.{end}").read_text(encoding="ascii") for end in ("crt", "key")]
        (folder / f"{name}.pem").write_text("".join(pair), encoding="ascii")


def _cluster_settings(bus: int) -> dict[str, str]:
    own = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-port": str(bus)}
    return own | {"cluster-node-timeout": str(_CALM_MS)}


def _serves(node: RedisServer) -> bool:
    return (
        b"cluster_state:ok" in node.call("CLUSTER", "INFO")
        and len(node.call("CLUSTER", "SLOTS")) == 3
    )


def _facts(pairs: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _send_command(stream: Any, words: Sequence[str | bytes | int]) -> Any:
    data = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    stream.write(
        b"*%d\r\n" % len(data) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in data)
    )
    stream.flush()
    return _reply(stream)


def _reply(stream: Any) -> Any:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"-":
        raise ReplyError(rest.decode(errors="replace"))
    if kind == b"+":
        return rest
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if int(rest) < 0 else stream.read(int(rest) + 2)[:-2]
    return [_reply(stream) for _ in range(int(rest))]
