import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvhold.core.errors import ConfigError

REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
log = logging.getLogger(__name__)

_MOST_BYTES = 64 << 10  # of a file that holds a secret
_SECRET_NAME = re.compile(r"secret|token|pas+(?!ive)|pwd|auth|cred|key(?!s)", re.IGNORECASE)
# paths, and numbers of tokens
_NO_SECRET = re.compile(r".*_file|tls_key|tokens_per_.*|.*_tokens", re.IGNORECASE)
_warned_of: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Misspelt names match, too."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.fullmatch(name)


def resolve(text: str, *, where: str, environ: Mapping[str, str] | None = None) -> str:
    """Replace every reference. Raises ConfigError, without the value.

    where: source of the text, for errors
    """
    return REFERENCE.sub(
        lambda found: _read(found[1], found[2], where, os.environ if environ is None else environ),
        text,
    )


def referenced_variables(texts: Iterable[str]) -> set[str]:
    names = set()
    for text in texts:
        names |= {name for kind, name in REFERENCE.findall(text) if kind == "env"}
        _, _, source = text.partition("=")
        if source.startswith("env:"):
            names.add(source.removeprefix("env:"))
    return names


def read_secret(path: str | Path, *, where: str) -> str:
    """Raises ConfigError if the file is unreadable, empty or larger than 64 KiB."""
    try:
        with Path(path).expanduser().open("rb") as file:
            warn_if_public(file.fileno(), str(path))
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode().strip()
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:  # its text quotes the file
        raise ConfigError(f"{where}: cannot read {path}: it is not UTF-8 text") from None
    if not text or len(raw) > _MOST_BYTES:
        raise ConfigError(f"{where}: {path} is {'larger than 64 KiB' if text else 'empty'}")
    return text


def warn_if_public(fd: int, path: str) -> None:
    if os.fstat(fd).st_mode & stat.S_IROTH and path not in _warned_of:
        _warned_of.add(path)
        log.warning(
            "%s holds a secret, and every user of this host can read it: chmod 600 it", path
        )


def _read(kind: str, place: str, where: str, environ: Mapping[str, str]) -> str:
    if kind == "file":
        return read_secret(place, where=f"{where}: ${{file:{place}}}")
    if place not in environ:
        raise ConfigError(f"{where}: ${{env:{place}}}: this variable is not set")
    return environ[place]
