"""Which LoRA adapter a request uses, by the content that its files have and always had.

    name = Adapters().name_of(request.lora_request)     # None: it cannot be told; then nothing of the request is cached

vLLM loads an adapter when a request first needs it, evicts it when others need its place, and loads it from its files again. So once the
files at a path have changed, a worker may have either state, and which one it has is not told to a connector. From then on requests of
that adapter are not cached, until the engine starts again or the adapter is loaded under another number. A step's KV is stored only if
the files are unchanged when it is planned. One thread, but for `is_unchanged`.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhold.core.errors import LayoutError
from kvhold.integrations.weights import adapter_identity, files_of

log = logging.getLogger(__name__)


@dataclass
class _Known:
    """An adapter's files as they were when they were named. name: None once they have changed."""

    stamp: tuple[tuple[str, int, int, int, int], ...]
    name: str | None


class Adapters:
    """The adapters of one engine."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], _Known] = {}

    def name_of(self, adapter: Any) -> str | None:
        """Return the name of a request's adapter, as vLLM's LoRARequest has it. None: not to be cached; a warning has said why."""
        known_as = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        known = self._known.get(known_as)
        try:
            stamp = _stamp(Path(adapter.lora_path).expanduser())
            if known is None:
                name = f"{adapter.lora_name}={adapter_identity(adapter.lora_path)}"
                if _stamp(Path(adapter.lora_path).expanduser()) != stamp:
                    raise LayoutError(f"the files in {adapter.lora_path} change while they are read")
                known = self._known[known_as] = _Known(stamp, name)
            elif known.name is not None and known.stamp != stamp:
                self._look_again(known, adapter, stamp)
        except (LayoutError, OSError) as error:
            if known is None or known.name is not None:
                log.warning("kvhold: requests of adapter %s are not cached: %s", adapter.lora_name, error)
            self._known[known_as] = known = _Known((), None)
        return known.name

    def is_unchanged(self, adapter: Any) -> bool:
        """Return whether a named adapter's files are still as they were. Any thread; some 20 microseconds."""
        known = self._known.get((adapter.lora_int_id, adapter.lora_name, adapter.lora_path))
        try:
            return known is not None and known.name is not None and _stamp(Path(adapter.lora_path).expanduser()) == known.stamp
        except (LayoutError, OSError):
            return False

    def _look_again(self, known: _Known, adapter: Any, stamp: tuple[tuple[str, int, int, int, int], ...]) -> None:
        """Something about the files has changed: their content, or their times alone."""
        name = f"{adapter.lora_name}={adapter_identity(adapter.lora_path)}"
        if name == known.name:
            known.stamp = stamp
            return
        known.name = None
        log.warning(
            "kvhold: requests of adapter %s are not cached any more: the files in %s have changed since they were named, and vLLM may have "
            "either state loaded. Load the new one under another name, or start the engine again",
            adapter.lora_name,
            adapter.lora_path,
        )

    def names(self) -> dict[tuple[int, str, str], str]:
        """Return the adapters that are named now, by vLLM's number, name and path."""
        return {known_as: known.name for known_as, known in self._known.items() if known.name is not None}


def _stamp(folder: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """What tells a change of an adapter's files without reading them; nothing for an adapter that is not a folder here."""
    if not folder.is_dir():
        return ()
    marks = []
    for file in files_of(folder, subfolders=False):
        status = file.stat()
        marks.append((file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return tuple(marks)
