"""The files of each adapter that vLLM loads in this worker.

KV is loaded and stored only if all loads of the adapter's number had the named content, and the
files are unchanged since.
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

_MOST_LOADS = 100_000  # with more, no KV is loaded or stored
_MOST_DIGESTS = 1000
_METHOD = "_load_adapter"


@dataclass(frozen=True)
class _Load:
    """vLLM's load of an adapter. identity: None: the files changed during it"""

    path: str
    stamp: Stamp
    identity: str | None


class AdapterLoads:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, _Load] = {}
        self._mixed: set[int] = set()
        self._digests: dict[tuple[str, Stamp], str] = {}

    def match(self, use: AdapterUse) -> bool:
        """vLLM computes with the named content, or will after a load."""
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
        with self._lock:
            before = self._last.get(number)
            if load.identity is None or (before is not None and before.identity != load.identity):
                self._mixed.add(number)
            if before is not None or len(self._last) < _MOST_LOADS:
                self._last[number] = load

    def observing(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def load_and_note(manager: Any, request: Any) -> Any:
            number, path = request.lora_int_id, request.lora_path
            content = self._content(path)
            adapter = load(manager, request)
            self.note(number, self._found(path, content))
            return adapter

        return load_and_note

    def _content(self, path: str) -> tuple[Stamp, str | None]:
        """An error would fail the engine."""
        try:
            stamp = stamp_of(path)
            if (known := self._digests.get((path, stamp))) is not None:
                return stamp, known
            is_old = has_settled(path)
            identity = adapter_identity(path)
            if is_old and stamp_of(path) == stamp:
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
        stamp, identity = before
        same = identity is not None and self._content(path) == before
        return _Load(path, stamp, identity if same else None)


def can_observe() -> bool:
    return _manager() is not None


def observed_loads() -> AdapterLoads:
    """Call it before the engine loads any adapter."""
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


_loads = AdapterLoads()
