"""Codecs by name: kvhold's own, and plugins (entry points in the group "kvhold.codecs")."""

import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TypeAlias

from kvhold.codecs.base import Codec
from kvhold.core.errors import ConfigError

log = logging.getLogger(__name__)

ENTRY_POINTS = "kvhold.codecs"

LOSES_NOTHING = ("raw", "lossless")

FindCodec: TypeAlias = Callable[[str], Codec | None]

_OURS: dict[str, EntryPoint] = {
    name: EntryPoint(name, f"kvhold.codecs.{place}", ENTRY_POINTS)
    for name, place in {
        "cachegen": "cachegen:CacheGen",
        "cachegen-fine": "cachegen:CacheGenFine",
        "cachegen-small": "cachegen:CacheGenSmall",
        "fp8": "fp8:FP8",
        "int8": "int8:Int8",
        "k8v4": "k8v4:K8V4",
        "kivi2": "kivi:KIVI2",
        "kivi4": "kivi:KIVI",
        "lossless": "lossless:Lossless",
        "raw": "raw:Raw",
        "turboquant4": "turboquant:TurboQuant4",
    }.items()
}


def codec_names() -> tuple[str, ...]:
    return tuple(sorted({*_OURS, *_plugins()}))


def make_codec(name: str) -> Codec:
    """One object a process. The first use on a machine may compile for half a minute.

    Raises ConfigError: unknown, or cannot be loaded.
    """
    check_codec(name)
    return _instance(name)


def check_codec(name: str) -> None:
    """Raise ConfigError for an unknown name, or without numba. Imports nothing."""
    if name not in codec_names():
        near = get_close_matches(name, codec_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"codec {name!r} is unknown; known are {', '.join(codec_names())}{hint}")
    if name in _OURS and name != "raw" and find_spec("numba") is None:
        raise ConfigError(
            f"codec {name!r} needs more than kvhold itself: pip install 'kvhold[numba]'"
        )


def is_lossy(name: str) -> bool:
    """Imports only a plugin's class."""
    if name in _OURS:
        return name not in LOSES_NOTHING
    try:
        return name in _plugins() and not _plugins()[name].load().lossless
    except (ImportError, AttributeError):
        return False


def find_codec(name: str) -> Codec | None:
    """None: unknown, or cannot be loaded (logged)."""
    if name not in _OURS and name not in _plugins():
        return None  # not cached: other hosts may send any name
    try:
        return _instance(name)
    except ConfigError as error:
        log.warning("%s", error)
        return None


@cache
def _instance(name: str) -> Codec:
    point = _OURS.get(name) or _plugins()[name]
    try:
        codec: Codec = point.load()()
    except (ImportError, AttributeError, TypeError) as error:
        if name in _OURS:
            raise ConfigError(
                f"codec {name!r} needs more than kvhold itself: pip install "
                f"'kvhold[numba]' ({error})"
            ) from error
        raise ConfigError(
            f"codec {name!r}: the plugin {point.value} cannot be loaded: {error}"
        ) from error
    if codec.name != name:
        raise ConfigError(f"codec {name!r}: the plugin {point.value} calls itself {codec.name!r}")
    return codec


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
