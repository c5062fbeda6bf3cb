"""Which LoRA adapter a request uses, by the content that its files have and always had.

    name = Adapters().name_of(request.lora_request)     # None: it cannot be told; then nothing of
    the request is cached

vLLM loads an adapter when a request first needs it, evicts it when others need its place, and loads
it from its files again. So once the files at a path have changed, a worker may have either state,
and which one it has is not told to a connector. From then on requests of that adapter are not
cached, until the engine starts again or the adapter is loaded under another number. A step's KV is
stored only if the files are unchanged when it is planned.

vLLM may also load an adapter ahead of its first request (`/v1/load_lora_adapter`,
`--lora-modules`), which a connector is not told either. Where the files are older than the engine,
every load of this engine found them as they are now. Where they are newer, only the workers can say
what was loaded (`loads.py`): with each load and store they get the adapter as it was named
(`use_of`), and compare. One thread, but for `is_unchanged` and `use_of`.
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

MARGIN_NS = 2_000_000_000
"""Files must be older than the engine by this: file systems round times, to 2 seconds at worst."""


@dataclass(frozen=True)
class AdapterUse:
    """The adapter that some KV belongs to.

    number:   vLLM's for it
    path:     of its files
    identity: of their content, by which the KV is named; empty: it cannot be told any more
    is_newer: the files are newer than the engine
    """

    number: int
    path: str
    identity: str
    is_newer: bool


@dataclass
class _Known:
    """An adapter's files as they were when they were named.

    name:     None once they have changed
    identity: of their content
    is_newer: than the engine
    """

    stamp: Stamp
    name: str | None
    identity: str = ""
    is_newer: bool = False


class Adapters:
    """The adapters of one engine. Make it before the engine loads any."""

    def __init__(self, can_observe: Callable[[], bool] = lambda: False) -> None:
        """can_observe: whether the workers see what vLLM loads; else no newer adapter is named."""
        self._can_observe = can_observe
        self._oldest_load_ns = time.time_ns()
        self._known: dict[tuple[int, str, str], _Known] = {}

    def name_of(self, adapter: Any) -> str | None:
        """Return the name of a request's adapter, as vLLM's LoRARequest has it.

        None: not to be cached; a warning has said why.
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
        return known.name

    def is_unchanged(self, adapter: Any) -> bool:
        """Return whether a named adapter's files are still as they were.

        Any thread; some 20 microseconds.
        """
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
        """Return the adapter as its KV is named, for the workers. Any thread."""
        known = self._known.get((adapter.lora_int_id, adapter.lora_name, adapter.lora_path))
        if known is None or known.name is None:
            return AdapterUse(adapter.lora_int_id, adapter.lora_path, "", is_newer=True)
        return AdapterUse(adapter.lora_int_id, adapter.lora_path, known.identity, known.is_newer)

    def _check_age(self, adapter: Any) -> bool:
        """Return whether this engine may have loaded the files before they were as they are.

        Raises LayoutError where that cannot be told.
        """
        is_newer = last_change(adapter.lora_path) > self._oldest_load_ns - MARGIN_NS
        if is_newer and not self._can_observe():
            raise LayoutError(
                f"the files in {adapter.lora_path} are newer than this engine, which may "
                "have loaded the adapter before they changed;"
                " start the engine again to have its requests cached"
            )
        return is_newer

    def _look_again(self, known: _Known, adapter: Any, stamp: Stamp) -> None:
        """Something about the files has changed: their content, or their times alone."""
        name = f"{adapter.lora_name}={adapter_identity(adapter.lora_path)}"
        if name == known.name:
            known.stamp = stamp
            return
        known.name = None
        log.warning(
            "kvhold: requests of adapter %s are not cached any more: the files in %s have "
            "changed since they were named, and vLLM may have "
            "either state loaded. Start the engine again to have them cached",
            adapter.lora_name,
            adapter.lora_path,
        )

    def names(self) -> dict[tuple[int, str, str], str]:
        """Return the adapters that are named now, by vLLM's number, name and path."""
        return {
            known_as: known.name
            for known_as, known in self._known.items()
            if known.name is not None
        }


def has_settled(path: str) -> bool:
    """Return whether an adapter's files last changed so long ago that any change from now on gets
    another time.
    """
    return last_change(path) < time.time_ns() - MARGIN_NS


def stamp_of(path: str) -> Stamp:
    """What tells a change of an adapter's files without reading them."""
    marks = []
    for file in adapter_places(path):
        status = file.stat()
        marks.append(
            (file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        )
    return tuple(marks)


def last_change(path: str) -> int:
    """When an adapter's files, its folder, or a link on the way to them last changed, in
    nanoseconds since 1970.

    What another file is moved to or linked to has an old time of its own, so the folder and the
    links count, too.
    """
    places = adapter_places(path)
    times = [_changed(place.stat()) for place in {*places, *(file.parent for file in places)}]
    return max([*times, *(made for file in places for made in _times_of_links(file.absolute()))])


def _changed(status: os.stat_result) -> int:
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _times_of_links(path: Path, depth: int = 0) -> Iterator[int]:
    """When each symbolic link on the way to a file was made, in nanoseconds since 1970."""
    if depth > 40:  # more than the system follows
        raise LayoutError(f"{path} is a link to a link, and so on")
    for place in (path, *path.parents):
        if place.is_symlink():
            yield place.lstat().st_ctime_ns
            yield from _times_of_links(place.parent / place.readlink(), depth + 1)
