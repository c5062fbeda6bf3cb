import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhold.core.errors import ConfigError
from kvhold.core.setting import setting
from kvhold.net.peers import DEFAULT_PORT
from kvhold.net.stream import Address

MOST_NAME = 253
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


@dataclass(frozen=True)
class Listing:
    """addresses: of other nodes, and of this one if the directory does not know it
    is_alone:  only this node is listed: an empty list is no fault
    """

    addresses: Sequence[Address]
    fault: str = ""
    is_alone: bool = False

    @property
    def is_usable(self) -> bool:
        return bool(self.addresses) or self.is_alone


@dataclass(frozen=True)
class Own:
    """address:           where other nodes reach it, `HOST:PORT`; empty: it serves no peers
    incarnation, port: 0: it serves no peers
    """

    address: str = ""
    incarnation: int = 0
    port: int = 0


class Directory(Protocol):
    source: str

    async def read(self, own: Own) -> Listing:
        """own: registered here, if the directory keeps registrations

        Raises TierError.
        """
        ...

    def registered_as(self) -> str: ...

    async def close(self) -> None:
        """Raises TierError."""
        ...


@dataclass(frozen=True)
class DirectoryConfig:
    refresh_s: float = setting(5.0, "how often the list of peers is read", minimum=0.05)
    keep_list_s: float = setting(
        600.0,
        "while the list cannot be read or is empty, lost peers stay in it for this time",
        minimum=0,
    )


def is_host_name(text: str) -> bool:
    return len(text) <= MOST_NAME and _NAME.fullmatch(text) is not None


def parse_address(text: str, *, where: str, default_port: int = DEFAULT_PORT) -> Address:
    """Parse `HOST:PORT`, or `HOST`. Raises ConfigError, which names `where`."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    port = int(match[3]) if match and match[3] else default_port
    if match is None or not 0 < port < 65536 or not (match[1] or is_host_name(match[2])):
        raise ConfigError(
            f"{where}: {text[:MOST_NAME]!r} is not HOST:PORT, such as 10.0.0.5:{DEFAULT_PORT}"
        )
    return Address(match[1] or match[2], port)
