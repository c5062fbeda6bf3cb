"""Loads and stores inside a forward pass, a layer at a time: the pass computes one layer while another is copied.

    passing = Layerwise(part, loader, copier)                # one for each worker, where `refusal` has nothing to say
    passing.begin(loads, prepare)                            # before the pass; copied on the loader's thread from then on
    passing.wait(layer)                                      # in the pass, before each layer's attention
    passing.save(layer, copies)                              # ... and after it
    passing.saved(), passing.end()                           # after the pass: whether all is copied out; which loads have failed

Only where a failed load can be computed again. What a pass computes after a failed load is wrong, and must reach nobody: vLLM takes the
request's tokens back, but has given its blocks to the prefix cache before the pass, has planned the next pass already where scheduling is
asynchronous, and cannot name blocks of several groups; and of several workers the others would store what they computed from it. So a
prefix cache in vLLM, asynchronous scheduling, several KV cache groups and several workers are refused.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING

from kvhold.core.errors import KVHoldError
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.steps import Load

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

CopyLayer = Callable[[int], None]  # of a layer's number in its part
LoadLayer = Callable[[int], Sequence[int]]  # the same; returns the blocks whose bytes are damaged
Prepare = Callable[[Load, ExitStack], list[LoadLayer]]  # claims a hit until the stack is closed; raises what goes wrong


def refusal(config: "VllmConfig", geometry: Geometry) -> str:
    """Why this engine cannot load inside its passes; empty: it can."""
    reasons = {
        "vLLM's prefix cache is on (--no-enable-prefix-caching)": bool(config.cache_config.enable_prefix_caching),
        "its scheduling is asynchronous (--no-async-scheduling)": bool(config.scheduler_config.async_scheduling),
        f"the model has {len(geometry.parts)} KV cache groups": len(geometry.parts) > 1,
        "the model keeps a state": any(part.group.attention == "state" for part in geometry.parts),
        f"there are {config.parallel_config.world_size} workers": config.parallel_config.world_size > 1,
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)


@dataclass
class _Pass:
    """One pass's loads.

    reached: so many layers are there
    asked:   the layers that the pass has waited for
    failed:  blocks of loads that have failed as a whole, by request
    damaged: blocks of damaged chunks, by request; the other blocks of that load have their KV
    """

    loads: list[Load]
    job: "Future[None] | None" = None
    reached: int = 0
    asked: set[int] = field(default_factory=set)
    failed: dict[str, list[int]] = field(default_factory=dict)
    damaged: dict[str, set[int]] = field(default_factory=dict)

    def failed_blocks(self, load: Load) -> list[int]:
        """The blocks that did not get their KV."""
        return self.failed.get(load.request_id) or sorted(self.damaged.get(load.request_id, ()))


class Layerwise:
    """One worker's passes. `begin`, `wait`, `save` and `end` are called by the engine's thread."""

    def __init__(self, part: Part, loader: Executor, copier: Executor) -> None:
        self._numbers = {name: number for number, name in enumerate(part.layer_names)}
        self._loader, self._copier = loader, copier
        self._changed = Condition()
        self._pass: _Pass | None = None
        self._saving: list[Future[None]] = []
        self._saved: set[int] = set()  # layers

    def begin(self, loads: Sequence[Load], prepare: Prepare) -> None:
        """Start the loads of the pass that is to come."""
        if loads:
            self._pass = _Pass(list(loads))
            self._pass.job = self._loader.submit(self._run, self._pass, prepare)

    def wait(self, layer_name: str) -> None:
        """Until the layer's KV is there, or cannot come any more."""
        one, number = self._pass, self._numbers.get(layer_name)
        if one is not None and number is not None:
            one.asked.add(number)
            with self._changed:
                self._changed.wait_for(lambda: one.reached > number)

    def save(self, layer_name: str, copies: Sequence[CopyLayer]) -> None:
        """Start to copy the layer out of its blocks, which the pass does not write any more."""
        number = self._numbers.get(layer_name)
        if number is not None:
            self._saving += [self._copier.submit(copy, number) for copy in copies]
            self._saved.add(number)

    def saved(self) -> bool:
        """Wait for the layers' copies. False: one has failed, or the pass has left a layer out."""
        saving, self._saving, saved, self._saved = self._saving, [], self._saved, set()
        errors = [error for future in saving if (error := future.exception()) is not None]
        for error in errors:
            log.error("kvhold: could not copy a layer", exc_info=error)
        return not errors and len(saved) == len(self._numbers)

    def end(self) -> dict[str, list[int]]:
        """The pass is over. Its loads, by request: the blocks that did not get their KV; none, where all is well."""
        one, self._pass = self._pass, None
        if one is None or one.job is None:
            return {}
        one.job.result()
        missed = len(self._numbers) - len(one.asked)
        if missed:  # the pass has read layers before they were there
            log.error("kvhold: vLLM did not wait for %d of %d layers; what was loaded is computed", missed, len(self._numbers))
        for load in one.loads:
            if load.request_id in one.damaged:
                log_damage(load, one.damaged[load.request_id])
        return {load.request_id: blocks_of(load) if missed else one.failed_blocks(load) for load in one.loads}

    def _run(self, one: _Pass, prepare: Prepare) -> None:
        """On the loader's thread: all the pass's loads, layer by layer. Never raises, and lets nobody wait for ever."""
        with ExitStack() as stack:
            stack.callback(self._reach, one, len(self._numbers))
            copies: dict[str, list[LoadLayer]] = {}
            for load in one.loads:
                with _noting(one.failed, load):
                    copies[load.request_id] = prepare(load, stack)
            for number in range(len(self._numbers)):
                for load in one.loads:
                    if load.request_id not in one.failed:
                        with _noting(one.failed, load):
                            for copy in copies[load.request_id]:
                                if damaged := copy(number):
                                    one.damaged.setdefault(load.request_id, set()).update(damaged)
                self._reach(one, number + 1)

    def _reach(self, one: _Pass, layers: int) -> None:
        with self._changed:
            one.reached = max(one.reached, layers)
            self._changed.notify_all()


@contextmanager
def _noting(failed: dict[str, list[int]], load: Load) -> Iterator[None]:
    """What goes wrong here goes wrong for this load alone."""
    try:
        yield
    except KVHoldError as error:
        log.warning("kvhold: the KV of request %s did not arrive and is computed: %s", load.request_id, error)
        failed[load.request_id] = blocks_of(load)
    except Exception:
        log.exception("kvhold: the KV of request %s could not be copied and is computed", load.request_id)
        failed[load.request_id] = blocks_of(load)


def log_damage(load: Load, blocks: Collection[int]) -> None:
    """Say that some blocks of a load are computed."""
    log.warning(
        "kvhold: of the %d blocks of request %s, %d are of damaged chunks; from the first of these on its KV is computed",
        len(blocks_of(load)),
        load.request_id,
        len(blocks),
    )


def blocks_of(load: Load) -> list[int]:
    """The blocks that it is to write."""
    return [block for ids in load.block_ids for block in ids if block >= 0]
