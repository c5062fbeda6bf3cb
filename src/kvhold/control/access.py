"""Roles: on TCP by tokens; without one, by a client's certificate, or callers on loopback may read,
unless reading needs one. The Unix socket needs none: only this user can open it.
"""

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import NamedTuple

from kvhold.core.control_config import ControlConfig
from kvhold.core.errors import ConfigError
from kvhold.core.secrets import read_secret
from kvhold.core.store_options import MAX_TENANT
from kvhold.net.addresses import is_loopback


class ControlRole(IntEnum):
    """Each includes the earlier ones."""

    NONE = 0
    READ = 1
    OPERATE = 2
    ADMINISTER = 3


class ForTenants(Enum):
    """A tenant's token: as others; by `TenantApi`; or status 403."""

    SHARED = "shared"
    OWN = "own"
    NEVER = "never"


@dataclass(frozen=True)
class Caller:
    """tenant: empty: all"""

    role: ControlRole
    tenant: str = ""


class _TokenFile(NamedTuple):
    where: str
    path: str
    caller: Caller


class Access:
    def __init__(self, config: ControlConfig, host: str) -> None:
        """host: of `control.listen`; empty: none

        Raises ConfigError: a token file is unreadable or repeats a token, or the address may not
        be exposed.
        """
        self._tokens: dict[bytes, Caller] = {}
        for file in _token_files(config):
            digest = _digest(read_secret(file.path, where=file.where))
            if digest in self._tokens:
                raise ConfigError(f"{file.where}: another role or tenant has the same token")
            self._tokens[digest] = file.caller
        needs_token = config.read_token_file or any(one.tenant for one in self._tokens.values())
        is_local = not host or is_loopback(host)
        of_certificate = _certificate_role(config)
        if not is_local:
            _check_exposed(config, has_role=bool(self._tokens or of_certificate))
        self.needs_host_check = is_local and not needs_token and not of_certificate
        """A page in a browser of this host could read answers under a name of its own."""
        self._role_without_token = of_certificate or (
            ControlRole.READ if self.needs_host_check else ControlRole.NONE
        )

    def caller_on_tcp(self, authorization: str) -> Caller:
        """authorization: the header; a wrong token gives no role"""
        if not authorization:
            return Caller(self._role_without_token)
        scheme, _, token = authorization.partition(" ")
        digest, caller = _digest(token.strip()), Caller(ControlRole.NONE)
        for known, of_token in self._tokens.items():
            if hmac.compare_digest(known, digest):
                caller = of_token
        return caller if scheme.lower() == "bearer" else Caller(ControlRole.NONE)


def _token_files(config: ControlConfig) -> Iterator[_TokenFile]:
    for role, path in (
        (ControlRole.READ, config.read_token_file),
        (ControlRole.OPERATE, config.operate_token_file),
        (ControlRole.ADMINISTER, config.administer_token_file),
    ):
        if path:
            yield _TokenFile(f"control.{role.name.lower()}_token_file", path, Caller(role))
    yield from _tenant_files("read", ControlRole.READ, config.tenant_read_token_files)
    yield from _tenant_files("operate", ControlRole.OPERATE, config.tenant_operate_token_files)


def _tenant_files(name: str, role: ControlRole, pairs: Iterable[str]) -> Iterator[_TokenFile]:
    where = f"control.tenant_{name}_token_files"
    for pair in pairs:
        tenant, _, path = pair.partition("=")
        if not tenant or not path or len(tenant) > MAX_TENANT or not tenant.isprintable():
            raise ConfigError(f"{where}: {pair[:80]!r} is not TENANT=PATH")
        yield _TokenFile(f"{where}.{tenant}", path, Caller(role, tenant))


def _certificate_role(config: ControlConfig) -> ControlRole:
    role = ControlRole[config.certificate_role.upper()]
    if role and not config.tls_client_ca:
        raise ConfigError(
            f"control.certificate_role is {config.certificate_role!r}, but no certificate is asked "
            "for; set control.tls_client_ca"
        )
    return role


def _check_exposed(config: ControlConfig, *, has_role: bool) -> None:
    where = f"control.listen = {config.listen!r}"
    if not has_role:
        raise ConfigError(
            f"{where}: only the loopback interface is served without a token; set "
            "control.read_token_file, control.operate_token_file or "
            "control.administer_token_file, or control.certificate_role"
        )
    if not config.tls_cert and not config.insecure:
        raise ConfigError(
            f"{where}: beyond loopback, tokens need TLS: set control.tls_cert, or "
            "control.insecure=true to send them in clear text"
        )


def _digest(token: str) -> bytes:
    return blake2b(token.encode(errors="surrogateescape")).digest()
