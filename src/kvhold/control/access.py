"""Only this user can open the Unix socket; it needs no token. On TCP, a token gives its role.
Without one, callers on loopback may read, unless reading needs one.
"""

import hmac
from enum import IntEnum
from hashlib import blake2b

from kvhold.core.control_config import ControlConfig
from kvhold.core.errors import ConfigError
from kvhold.core.secrets import read_secret
from kvhold.net.addresses import is_loopback


class ControlRole(IntEnum):
    """Each includes the earlier ones."""

    NONE = 0
    READ = 1
    OPERATE = 2
    ADMINISTER = 3


class Access:
    def __init__(self, config: ControlConfig, host: str) -> None:
        """host: of `control.listen`; empty: none

        Raises ConfigError: a token file is unreadable or repeats a token, or the address may not
        be exposed.
        """
        self._tokens: dict[bytes, ControlRole] = {}
        files = {
            ControlRole.READ: config.read_token_file,
            ControlRole.OPERATE: config.operate_token_file,
            ControlRole.ADMINISTER: config.administer_token_file,
        }
        for role, file in files.items():
            if file:
                where = f"control.{role.name.lower()}_token_file"
                digest = _digest(read_secret(file, where=where))
                if digest in self._tokens:
                    raise ConfigError(f"{where}: another role has the same token")
                self._tokens[digest] = role
        is_local = not host or is_loopback(host)
        if not is_local:
            _check_exposed(config, has_tokens=bool(self._tokens))
        self._role_without_token = (
            ControlRole.READ if is_local and not config.read_token_file else ControlRole.NONE
        )

    @property
    def needs_host_check(self) -> bool:
        """A page in a browser of this host could read answers under a name of its own."""
        return self._role_without_token is not ControlRole.NONE

    def role_on_tcp(self, authorization: str) -> ControlRole:
        """authorization: the header; a wrong token gives no role"""
        if not authorization:
            return self._role_without_token
        scheme, _, token = authorization.partition(" ")
        digest, role = _digest(token.strip()), ControlRole.NONE
        for known, of_token in self._tokens.items():
            if hmac.compare_digest(known, digest):
                role = of_token
        return role if scheme.lower() == "bearer" else ControlRole.NONE


def _check_exposed(config: ControlConfig, *, has_tokens: bool) -> None:
    where = f"control.listen = {config.listen!r}"
    if not has_tokens:
        raise ConfigError(
            f"{where}: only the loopback interface is served without a token; set "
            "control.read_token_file, control.operate_token_file or control.administer_token_file"
        )
    if not config.tls_cert and not config.insecure:
        raise ConfigError(
            f"{where}: beyond loopback, tokens need TLS: set control.tls_cert, or "
            "control.insecure=true to send them in clear text"
        )


def _digest(token: str) -> bytes:
    return blake2b(token.encode(errors="surrogateescape")).digest()
