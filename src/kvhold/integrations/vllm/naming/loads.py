"""Record the files that vLLM has loaded adapters from, in this worker's process.

    loads = observed_loads()                # before the engine loads any adapter
    loads.match(use)  # may this KV be loaded or stored under the adapter's name?

vLLM names an adapter by a number. It loads the adapter when a request or the API needs it, evicts
it, and loads it from its files again. A connector is not told about these loads, so kvhold wraps
the method that loads an adapter. Each load is recorded with the digest of its files, if they did
not change during the load.

KV is loaded and stored only if all loads of the number had the content that the adapter is named
by, and the files are unchanged since the last load. A vLLM without that method has no records
(`can_observe`).
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kvhold.core.errors import LayoutError
from kvhold.integrations.vllm.naming.adapters import AdapterUse, Stamp, has_settled, stamp_of
from kvhold.integrations.weights import adapter_identity

log = logging.getLogger(__name__)

_MOST_LOADS = 100_000  # remembered loads; beyond them no adapter's KV is loaded or stored
_MOST_DIGESTS = 1000  # remembered digests
_METHOD = "_load_adapter"


@dataclass(frozen=True)
class _Load:
    """One load of an adapter.

    identity: the files' digest; None if they changed during the load, or cannot be read
    """

    path: str
    stamp: Stamp
    identity: str | None


class AdapterLoads:
    """The loads of this process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, _Load] = {}  # by number
        self._mixed: set[int] = set()  # numbers whose loads had different contents
        self._digests: dict[tuple[str, Stamp], str] = {}  # of files that had settled before

    def match(self, use: AdapterUse) -> bool:
        """Whether vLLM computes with the content that the KV is named by, or will after a load."""
        with self._lock:
            if use.number in self._mixed or len(self._last) >= _MOST_LOADS:
                return False
            last = self._last.get(use.number)
        if last is None:
            return not use.is_newer
        try:
            return last.identity == use.identity and stamp_of(last.path) == last.stamp
        except (LayoutError, OSError):
            return False

    def note(self, number: int, load: _Load) -> None:
        """Record that vLLM has loaded an adapter."""
        with self._lock:
            before = self._last.get(number)
            if load.identity is None or (before is not None and before.identity != load.identity):
                self._mixed.add(number)
            if before is not None or len(self._last) < _MOST_LOADS:
                self._last[number] = load

    def observing(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap vLLM's method so that it records its loads."""

        @wraps(load)
        def load_and_note(manager: Any, request: Any) -> Any:
            number, path = request.lora_int_id, request.lora_path
            content = self._content(path)
            adapter = load(manager, request)
            self.note(number, self._found(path, content))
            return adapter

        return load_and_note

    def _content(self, path: str) -> tuple[Stamp, str | None]:
        """Return the files' stamp and digest now. Never raises, because the engine would fail."""
        try:
            stamp = stamp_of(path)
            if (known := self._digests.get((path, stamp))) is not None:
                return stamp, known
            is_old = has_settled(path)
            identity = adapter_identity(path)
            if is_old and stamp_of(path) == stamp:  # any later change changes the stamp
                self._digests = {(path, stamp): identity} | dict(
                    list(self._digests.items())[:_MOST_DIGESTS]
                )
            return stamp, identity
        except (LayoutError, OSError) as error:
            log.warning("kvhold: the adapter in %s is not cached: %s", path, error)
        except Exception:
            log.exception("kvhold: the adapter in %s is not cached", path)
        return (), None

    def _found(self, path: str, before: tuple[Stamp, str | None]) -> _Load:
        """Return the record of a load that has just ended."""
        stamp, identity = before
        same = identity is not None and self._content(path) == before
        return _Load(path, stamp, identity if same else None)


def can_observe() -> bool:
    """Whether this vLLM has the method that kvhold wraps."""
    return _manager() is not None


def observed_loads() -> AdapterLoads:
    """Return the loads of this process, observed from the first call on."""
    manager = _manager()
    if manager is not None and not hasattr(getattr(manager, _METHOD), "kvhold_loads"):
        method = _loads.observing(getattr(manager, _METHOD))
        method.kvhold_loads = _loads  # type: ignore[attr-defined]
        setattr(manager, _METHOD, method)
    return _loads


def _manager() -> Any:
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager
    except ImportError:
        return None
    return WorkerLoRAManager if callable(getattr(WorkerLoRAManager, _METHOD, None)) else None


_loads = AdapterLoads()  # shared by all engines of this process
