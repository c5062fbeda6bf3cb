import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvhold_lab.servers.base import program


@dataclass(frozen=True)
class Certificates:
    """PEM files for 127.0.0.1 and localhost."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Raises NotInstalled without openssl."""
    openssl = program("openssl", "apt-get install openssl")
    made = Certificates(
        *(
            folder / name
            for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
        )
    )
    ca_key = folder / "ca.key"
    _run(
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
        "-keyout",
        ca_key,
        "-out",
        made.ca,
    )
    for name, certificate, key in (
        ("127.0.0.1", made.server, made.server_key),
        ("client", made.client, made.client_key),
    ):
        request, extra = folder / f"{name}.csr", folder / f"{name}.ext"
        extra.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _run(
            openssl,
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            f"/CN={name}",
            "-keyout",
            key,
            "-out",
            request,
        )
        _run(
            openssl,
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            made.ca,
            "-CAkey",
            ca_key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            extra,
            "-out",
            certificate,
        )
    return made


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
