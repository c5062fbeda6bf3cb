"""Name a request's LoRA adapter by the content of its files.

vLLM loads adapters without telling the connector (docs/decisions/0022). Its prefix cache identifies
an adapter by name and path, its image embeddings by the name. After two contents of these, the
adapter is not cached until a restart.

Files older than the engine had one content. For newer ones, the workers compare the name with their
loads (`loads.py`). One thread, except `is_unchanged` and `use_of`.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhold.core.errors import LayoutError
from kvhold.integrations.weights import adapter_identity, adapter_places

log = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int, int, int], ...]

_SEVERAL = "several contents, or an unidentified one"

MARGIN_NS = 2_000_000_000
"""Files must be this much older than the engine: file systems round times by up to 2 seconds."""


@dataclass(frozen=True)
class AdapterUse:
    """identity: digest of the files; empty: unknown"""

    number: int
    path: str
    identity: str
    is_newer: bool


@dataclass
class _Known:
    stamp: Stamp
    name: str | None
    identity: str = ""
    is_newer: bool = False


class Adapters:
    """Make it before the engine loads any."""

    def __init__(self, can_observe: Callable[[], bool] = lambda: False) -> None:
        """can_observe: the workers see vLLM's loads"""
        self._can_observe = can_observe
        self._oldest_load_ns = time.time_ns()
        self._known: dict[tuple[int, str, str], _Known] = {}
        self._contents: dict[tuple[str, ...], str] = {}

    def name_of(self, adapter: Any, *, has_media: bool = False) -> str | None:
        """None: not cached; the reason is logged. Call it for every request with the adapter, in
        order.
        """
        known_as = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        known = self._known.get(known_as)
        try:
            stamp = stamp_of(adapter.lora_path)
            if known is None:
                is_newer = self._check_age(adapter)
                identity = adapter_identity(adapter.lora_path)
                if stamp_of(adapter.lora_path) != stamp:
                    raise LayoutError(
                        f"the files in {adapter.lora_path} change while they are read"
                    )
                known = self._known[known_as] = _Known(
                    stamp, f"{adapter.lora_name}={identity}", identity, is_newer
                )
            elif known.name is not None and known.stamp != stamp:
                self._look_again(known, adapter, stamp)
        except (LayoutError, OSError) as error:
            if known is None or known.name is not None:
                log.warning(
                    "kvhold: requests of adapter %s are not cached: %s", adapter.lora_name, error
                )
            self._known[known_as] = known = _Known((), None)
        self._note(adapter, known.identity if known.name is not None else _SEVERAL)
        return known.name if self._is_one_content(adapter, has_media=has_media) else None

    def is_unchanged(self, adapter: Any, *, has_media: bool = False) -> bool:
        if not self._is_one_content(adapter, has_media=has_media):
            return False
        known = self._known.get((adapter.lora_int_id, adapter.lora_name, adapter.lora_path))
        try:
            return (
                known is not None
                and known.name is not None
                and stamp_of(adapter.lora_path) == known.stamp
            )
        except (LayoutError, OSError):
            return False

    def use_of(self, adapter: Any) -> AdapterUse:
        known = self._known.get((adapter.lora_int_id, adapter.lora_name, adapter.lora_path))
        if known is None or known.name is None:
            return AdapterUse(adapter.lora_int_id, adapter.lora_path, "", is_newer=True)
        return AdapterUse(adapter.lora_int_id, adapter.lora_path, known.identity, known.is_newer)

    def _note(self, adapter: Any, identity: str) -> None:
        for key in ((adapter.lora_name, adapter.lora_path), (adapter.lora_name,)):
            before = self._contents.setdefault(key, identity)
            if before not in (identity, _SEVERAL):
                self._contents[key] = _SEVERAL
                is_path = len(key) == 2
                log.log(
                    logging.WARNING if is_path else logging.INFO,
                    "kvhold: %s of adapter %s are not cached any more: the name has had other "
                    "content, whose results vLLM may use. Give each content its own name",
                    "requests" if is_path else "images",
                    adapter.lora_name,
                )

    def _is_one_content(self, adapter: Any, *, has_media: bool) -> bool:
        of_path = self._contents.get((adapter.lora_name, adapter.lora_path))
        of_name = self._contents.get((adapter.lora_name,)) if has_media else of_path
        return _SEVERAL not in (of_path, of_name)

    def _check_age(self, adapter: Any) -> bool:
        """True: this engine may have loaded an earlier content.

        Raises LayoutError if so and the workers do not see vLLM's loads.
        """
        is_newer = last_change(adapter.lora_path) > self._oldest_load_ns - MARGIN_NS
        if is_newer and not self._can_observe():
            raise LayoutError(
                f"the files in {adapter.lora_path} are newer than this engine, which may "
                "have loaded the adapter before they changed;"
                " restart the engine to have its requests cached"
            )
        return is_newer

    def _look_again(self, known: _Known, adapter: Any, stamp: Stamp) -> None:
        name = f"{adapter.lora_name}={adapter_identity(adapter.lora_path)}"
        if name == known.name:
            known.stamp = stamp
            return
        known.name = None
        log.warning(
            "kvhold: requests of adapter %s are not cached any more: the files in %s have "
            "changed since they were named, and vLLM may have "
            "loaded either content. Restart the engine to have them cached",
            adapter.lora_name,
            adapter.lora_path,
        )

    def names(self) -> dict[tuple[int, str, str], str]:
        return {
            known_as: known.name
            for known_as, known in self._known.items()
            if known.name is not None
        }


def has_settled(path: str) -> bool:
    """Later changes will change the files' time."""
    return last_change(path) < time.time_ns() - MARGIN_NS


def stamp_of(path: str) -> Stamp:
    """Names, sizes, times and inodes change with the files."""
    marks = []
    for file in adapter_places(path):
        status = file.stat()
        marks.append(
            (file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        )
    return tuple(marks)


def last_change(path: str) -> int:
    """ns since 1970. Folder and links count, because a moved file keeps its time."""
    places = adapter_places(path)
    times = [_changed(place.stat()) for place in {*places, *(file.parent for file in places)}]
    return max([*times, *(made for file in places for made in _times_of_links(file.absolute()))])


def _changed(status: os.stat_result) -> int:
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _times_of_links(path: Path, depth: int = 0) -> Iterator[int]:
    if depth > 40:
        raise LayoutError(f"{path} leads through too many links")
    for place in (path, *path.parents):
        if place.is_symlink():
            yield place.lstat().st_ctime_ns
            yield from _times_of_links(place.parent / place.readlink(), depth + 1)
