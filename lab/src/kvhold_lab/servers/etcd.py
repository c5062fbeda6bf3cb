import json
import ssl
import urllib.request
from collections.abc import Sequence
from typing import Any

from kvhold_lab.servers.base import ServerProcess, free_port, program
from kvhold_lab.servers.certificates import Certificates, make_certificates

_CALL_S = 20.0


class EtcdServer(ServerProcess):
    """tls: TLS only, with client certificates: `certificates`"""

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__()
        self._peer_port = free_port()
        self._tls = tls
        self._made: Certificates | None = None

    @property
    def certificates(self) -> Certificates:
        if self._made is None:
            self._made = make_certificates(self.folder)
        return self._made

    def call(self, path: str, *, token: str = "", **request: Any) -> Any:
        """token: of a login. Raises OSError."""
        headers = {"Authorization": token} if token else {}
        return self._open(f"/v3/{path}", data=json.dumps(request).encode(), headers=headers)

    def add_user(self, name: str, password: str) -> None:
        for user, role in (("root", "root"), (name, "kvhold")):
            self.call("auth/user/add", name=user, password=password)
            self.call("auth/role/add", name=role)
            self.call("auth/user/grant", user=user, role=role)
        self.call(
            "auth/role/grant",
            name="kvhold",
            # base64 of /kvhold/ and of the first key after it
            perm={"permType": "READWRITE", "key": "L2t2aG9sZC8=", "range_end": "L2t2aG9sZDA="},
        )
        self.call("auth/enable")

    def answers(self) -> bool:
        return bool(self._open("/health")["health"] == "true")

    def command(self) -> Sequence[str]:
        etcd = program("etcd", "apt-get install etcd-server")
        here = f"{self._scheme}://127.0.0.1:{self.port}"
        peers = f"http://127.0.0.1:{self._peer_port}"
        command = [etcd, "--name", "kvhold", "--data-dir", str(self.folder / "data")]
        command += ["--listen-client-urls", here, "--advertise-client-urls", here]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"kvhold={peers}", "--log-level", "warn"]
        if self._tls:
            made = self.certificates
            command += ["--cert-file", str(made.server), "--key-file", str(made.server_key)]
            command += ["--client-cert-auth", "--trusted-ca-file", str(made.ca)]
        return command

    def _open(self, path: str, **request: Any) -> Any:
        context = None
        if self._tls:
            made = self.certificates
            context = ssl.create_default_context(cafile=str(made.ca))
            context.load_cert_chain(made.client, made.client_key)
        asking = urllib.request.Request(f"{self._scheme}://127.0.0.1:{self.port}{path}", **request)
        with urllib.request.urlopen(asking, timeout=_CALL_S, context=context) as response:
            return json.load(response)

    @property
    def _scheme(self) -> str:
        return "https" if self._tls else "http"
