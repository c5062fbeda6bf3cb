"""`redis://user:secret@host:6379/0?ttl_s=3600`: a tier's address and settings in one line.

A password or an option may be a reference, such as `${env:REDIS_PASSWORD}`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from kvhold.core.errors import ConfigError
from kvhold.core.secrets import REFERENCE, is_secret_name, resolve
from kvhold.core.setting import apply

Settings = TypeVar("Settings")

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_NTH = re.compile(r"[a-z]+:[a-z]+:[\d.]*@\d+(?=[:,+%]|$)")  # a rule with '@': see `faults.py`


@dataclass(frozen=True, repr=False)
class TierUrl:
    """`netloc` may name several hosts. The `repr` shows no secrets."""

    scheme: str
    netloc: str
    path: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        return f"TierUrl({self.shown})"

    @property
    def username(self) -> str:
        return resolve(unquote(self._credentials.partition(":")[0]), where=self.shown)

    @property
    def password(self) -> str:
        return resolve(unquote(self._credentials.partition(":")[2]), where=self.shown)

    @property
    def has_secret(self) -> bool:
        """A reference is not a secret."""
        user, colon, password = (unquote(part) for part in self._credentials.partition(":"))
        named = [
            password if colon else user,
            *(value for name, value in self.options.items() if is_secret_name(name)),
        ]
        return any(value and not REFERENCE.fullmatch(value) for value in named)

    @property
    def hosts(self) -> list[tuple[str, int | None]]:
        """Raises ConfigError."""
        return [self._host(part) for part in self.netloc.rpartition("@")[2].split(",") if part]

    @property
    def shown(self) -> str:
        """Without passwords and tokens, for logs, metrics and errors."""
        credentials, at, hosts = self.netloc.rpartition("@")
        user, colon, _ = credentials.partition(":")
        shown = f"{user}:***" if colon else "***" if user else ""  # a lone user may be a token
        pairs = "&".join(
            f"{k}={'***' if is_secret_name(k) else v}" for k, v in self.options.items()
        )
        return f"{self.scheme}://{shown}{at}{hosts}{self.path}{'?' if pairs else ''}{pairs}"

    def apply(self, config: Settings) -> Settings:
        """Raises ConfigError, which names the line, the option and the nearest valid one."""
        return apply(
            config,
            {k: resolve(v, where=self.shown) for k, v in self.options.items()},
            source=self.shown,
        )

    def without(self, names: Mapping[str, object]) -> "TierUrl":
        return replace(self, options={k: v for k, v in self.options.items() if k not in names})

    @property
    def _credentials(self) -> str:
        return self.netloc.rpartition("@")[0]

    def _host(self, part: str) -> tuple[str, int | None]:
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?", part)
        if match is None or (match[2] and not 0 < int(match[2]) < 65536):
            raise ConfigError(f"{self.shown}: {part!r} is not host:port")
        return match[1].strip("[]"), int(match[2]) if match[2] else None


def parse_url(text: str) -> TierUrl:
    """Raises ConfigError, which shows no secret."""
    text = REFERENCE.sub(lambda found: quote(found[0], safe=""), text)
    if not _SCHEME.match(text):
        raise ConfigError(
            f"tiers: {_place(text)!r} is not a tier's URL, such as disk:///var/cache/kvhold or "
            "redis://host:6379/0"
        )
    try:
        parts = urlsplit(text)
    except ValueError:  # may show the password
        raise ConfigError(f"tiers: {_place(text)!r} is not a URL") from None
    if parts.fragment:
        raise ConfigError(f"tiers: {parts.scheme}://...: '#' begins a fragment; write it as %23")
    # `shown` would reveal a password with '/', '?' or '@'
    if any("@" in word for word in (parts.path, *_options_to_check(parts))):
        raise ConfigError(
            f"tiers: {parts.scheme}://...: in a password, '/' is %2F, '?' is %3F and '@' is %40; "
            "in a path or an option, '@' is %40"
        )
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigError(
            f"tiers: {parts.scheme}://...: options are written ?name=value&name=value"
        ) from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"tiers: {parts.scheme}://...: an option is given twice")
    return TierUrl(parts.scheme, parts.netloc, unquote(parts.path), options)


def _options_to_check(parts: SplitResult) -> Iterator[str]:
    has_faults = "faults" in parts.scheme.split("+")[:-1]
    for word in parts.query.split("&"):
        yield _NTH.sub("", word) if has_faults and word.startswith("faults=") else word


def _place(text: str) -> str:
    line, _, options = text.partition("?")
    return "..." if "@" in options else line.rpartition("@")[2]
