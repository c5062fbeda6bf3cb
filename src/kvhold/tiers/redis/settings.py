"""See docs/tiers.md. `valkey` means `redis`."""

from dataclasses import dataclass, replace

from kvhold.core.errors import ConfigError
from kvhold.core.setting import setting, size
from kvhold.net.stream import Address
from kvhold.tiers.redis.split import HEAD_BYTES
from kvhold.tiers.url import TierUrl

_PORT = 6379
_SENTINEL_PORT = 26379
_MAX_VALUE_BYTES = 512 << 20


@dataclass(frozen=True)
class RedisConfig:
    addresses: tuple[Address, ...] = setting(
        (), "the server; or some nodes of the cluster, or the sentinels"
    )
    username: str = setting("", "the ACL user")
    password: str = setting("", "the user's password, or the server's", secret=True)
    db: int = setting(0, "number of the database; a cluster has only 0", minimum=0)
    cluster: bool = setting(False, "the addresses are nodes of a cluster")
    service: str = setting(
        "", "the sentinels' name of the primary; then the addresses are sentinels"
    )
    sentinel_username: str = setting("", "the ACL user of the sentinels")
    sentinel_password: str = setting("", "the password of the sentinels", secret=True)
    tls: bool = setting(False, "use TLS, for sentinels too")
    ca_file: str = setting(
        "",
        "PEM file of the certificate authorities to trust for the server; empty: the system's",
    )
    cert_file: str = setting("", "PEM file of the client's certificate, if the server requires one")
    key_file: str = setting("", "PEM file of the certificate's key; empty: it is in cert_file")
    verify: str = setting(
        "full",
        "check the server's certificate and its name, the certificate only, or nothing",
        choices=("full", "chain", "none"),
    )
    prefix: str = setting("kvhold:", "beginning of the names of this tier's keys")
    ttl_s: float = setting(
        0.0,
        "time after which a value is removed; 0: keep it until the server evicts it",
        minimum=0,
    )
    connections: int = setting(
        4, "connections to each server that carry values; two more carry small commands", minimum=1
    )
    max_value_bytes: int = size(
        _MAX_VALUE_BYTES,
        "larger values are stored in parts; at most the server's proto-max-bulk-len",
    )

    def check(self) -> None:
        if not all(isinstance(address, Address) for address in self.addresses):
            raise ConfigError(
                "redis: addresses = ...: servers are named before the '?', as in "
                "redis://host:port/0"
            )
        if not self.addresses:
            raise ConfigError("redis: no server is named; write redis://host:port/0")
        if self.cluster and self.service:
            raise ConfigError(
                "redis: `cluster` and `service` exclude each other: Sentinel watches single servers"
            )
        if len(self.addresses) > 1 and not self.cluster and not self.service:
            raise ConfigError(
                "redis: several servers are named; write redis-cluster://... or "
                "redis-sentinel://...?service=name"
            )
        if self.cluster and self.db:
            raise ConfigError(f"redis: db = {self.db}: a cluster has database 0 only")
        if any(c in self.prefix for c in "{}\r\n"):
            raise ConfigError(
                f"redis: prefix = {self.prefix!r}: braces and line ends are not allowed"
            )
        if self.max_value_bytes <= HEAD_BYTES:
            raise ConfigError(
                f"redis: max_value_bytes = {self.max_value_bytes}: must be more than {HEAD_BYTES}"
            )
        if (self.username and not self.password) or (
            self.sentinel_username and not self.sentinel_password
        ):
            raise ConfigError(
                "redis: a user is named without a password; write redis://user:password@host:port/0"
            )
        if not self.tls and (
            self.ca_file or self.cert_file or self.key_file or self.verify != "full"
        ):
            raise ConfigError(
                "redis: ca_file, cert_file, key_file and verify are for TLS; write "
                "rediss://... or tls=true"
            )


def config_from(url: TierUrl) -> RedisConfig:
    kind = url.scheme.replace("valkeys", "rediss").replace("valkey", "redis")
    base = RedisConfig(
        username=url.username,
        password=url.password,
        tls=kind == "rediss",
        cluster=kind == "redis-cluster",
    )
    if kind == "unix":
        return url.apply(
            replace(base, addresses=(Address(socket=url.path),) if url.path.strip("/") else ())
        )
    port = _SENTINEL_PORT if kind == "redis-sentinel" else _PORT
    base = replace(
        base,
        addresses=tuple(Address(host, given or port) for host, given in url.hosts),
        db=_db(url),
    )
    config = url.apply(base)
    if kind == "redis-sentinel" and not config.service:
        raise ConfigError(
            f"{url.shown}: which primary? Add ?service=name, the primary's name at the sentinels"
        )
    return config


def _db(url: TierUrl) -> int:
    path = url.path.strip("/")
    if path and not path.isdecimal():
        raise ConfigError(f"{url.shown}: {path!r} is not the number of a database")
    return int(path or 0)
