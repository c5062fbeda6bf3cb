import re
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from obstore.store import S3Store

from kvhold.core.errors import ConfigError
from kvhold.core.setting import setting, size

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_SEGMENT = re.compile(r"[A-Za-z0-9_=+@,:!-][A-Za-z0-9._=+@,:!-]*")  # no layer encodes these

_LEAST_PART = 5 << 20  # for all parts but the last
_NO_TIMEOUT = timedelta(days=1)  # obstore's default is 30 s
_RETRIES = 1
_BACKOFF = timedelta(milliseconds=20)


@dataclass(frozen=True)
class S3Config:
    bucket: str = setting("", "the bucket; it must exist")
    prefix: str = setting(
        "", "folder in the bucket; tiers with different prefixes do not see each other"
    )
    endpoint: str = setting(
        "",
        "http[s]://host[:port] of the store; empty: AWS, or AWS_ENDPOINT_URL_S3 of the environment",
    )
    region: str = setting(
        "", "the bucket's region; empty: AWS_REGION of the environment, or us-east-1"
    )
    access_key_id: str = setting(
        "",
        "empty: found in the environment, a container, a web identity or the instance, as "
        "AWS's tools do",
        secret=True,
    )
    secret_access_key: str = setting("", "belongs to access_key_id", secret=True)
    session_token: str = setting("", "belongs to access_key_id, if that is temporary", secret=True)
    anonymous: bool = setting(False, "send no credentials at all")
    virtual_hosted: bool = setting(
        False, "name the bucket in the host (bucket.host), not in the path"
    )
    unsigned_payload: str = setting(
        "auto",
        "leave the body out of the signature; auto: with TLS or on loopback",
        choices=("auto", "true", "false"),
    )
    ca_file: str = setting(
        "", "PEM file of certificate authorities to trust in addition to the system's"
    )
    parallel: int = setting(16, "values transferred at once", minimum=1)
    parallel_probes: int = setting(128, "values probed at once", minimum=1)
    put_if_absent: bool = setting(
        True, "the store enforces `If-None-Match: *`; false: probe, then write"
    )
    bulk_delete: bool = setting(
        True, "the store has DeleteObjects; false: one request for each object"
    )
    multipart_bytes: int = size(256 << 20, "values of this size and more are put in parallel parts")
    part_bytes: int = size(16 << 20, "size of such a part; at least 5MiB")
    connect_timeout_s: float = setting(1.0, "deadline of a new connection", minimum=0.01)


def check_config(config: S3Config) -> None:
    if not _BUCKET.fullmatch(config.bucket):
        raise ConfigError(
            f"s3: {config.bucket!r} is not a bucket's name; write s3://bucket/prefix?endpoint=..."
        )
    if bool(config.access_key_id) != bool(config.secret_access_key) or (
        config.session_token and not config.access_key_id
    ):
        raise ConfigError(
            "s3: access_key_id and secret_access_key belong together, and session_token to both"
        )
    if config.anonymous and config.access_key_id:
        raise ConfigError("s3: anonymous means without access_key_id")
    if config.part_bytes < _LEAST_PART:
        raise ConfigError(f"s3: part_bytes = {config.part_bytes}: S3 requires at least 5MiB")
    prefix_of(config)
    endpoint_url(config)


def prefix_of(config: S3Config) -> str:
    segments = [segment for segment in config.prefix.split("/") if segment]
    for segment in segments:
        if not _SEGMENT.fullmatch(segment):
            raise ConfigError(
                f"s3: prefix: {segment!r} has characters that stores spell differently; "
                "use letters, digits and ._=+@,:!-"
            )
    return "".join(f"{segment}/" for segment in segments)


def endpoint_url(config: S3Config) -> str:
    """Empty: the default. Raises ConfigError."""
    if not config.endpoint:
        return ""
    parts = _split(config.endpoint)
    if config.virtual_hosted:
        parts = parts._replace(netloc=f"{config.bucket}.{parts.netloc}")
    return parts.geturl().rstrip("/")


def open_store(config: S3Config) -> S3Store:
    """Raises ConfigError if `ca_file` cannot be read."""
    endpoint = endpoint_url(config)
    options: dict[str, Any] = {
        "virtual_hosted_style_request": config.virtual_hosted,
        "unsigned_payload": _is_unsigned(config),
    }
    given = {
        "aws_endpoint_url_s3": endpoint,
        "region": config.region,
        "access_key_id": config.access_key_id,
        "secret_access_key": config.secret_access_key,
        "session_token": config.session_token,
        "skip_signature": config.anonymous,
        "disable_bulk_delete": not config.bulk_delete,
    }
    options |= {name: value for name, value in given.items() if value}
    client: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": _NO_TIMEOUT,
    }
    if config.ca_file:
        client["root_certificate"] = _read(config.ca_file)
    return S3Store(
        config.bucket,
        config=options,  # type: ignore[arg-type]  # a TypedDict, built by name
        client_options=client,  # type: ignore[arg-type]
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=config.connect_timeout_s),
            "backoff": {"init_backoff": _BACKOFF, "max_backoff": 2 * _BACKOFF, "base": 2},
        },
    )


def _split(endpoint: str) -> SplitResult:
    try:
        parts = urlsplit(endpoint)
        known = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError("s3: endpoint must be http[s]://host[:port], without credentials")
    return parts


def _is_unsigned(config: S3Config) -> bool:
    """Leave out the body. "auto" saves its SHA-256 with TLS and on loopback."""
    if config.unsigned_payload != "auto":
        return config.unsigned_payload == "true"
    return (
        not config.endpoint
        or _split(config.endpoint).scheme == "https"
        or _is_loopback(_split(config.endpoint).hostname or "")
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"s3: ca_file: cannot read {path}: {error.strerror}") from None
