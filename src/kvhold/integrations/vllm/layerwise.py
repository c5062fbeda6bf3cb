"""Load and store inside a forward pass: copy one layer while another is computed.

vLLM cannot always undo a failed load inside a pass (docs/decisions/0016).
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DamagedChunks, DeviceError, KVHoldError
from kvhold.core.holdings import ChunkBytes
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.steps import Load
from kvhold.memory.copier import Copier, Mark, Piece, Transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

# claims a load's hit until the stack is closed
Prepare = Callable[[Load, ExitStack], list[Piece]]


def refusal(config: "VllmConfig", geometry: Geometry) -> str | None:
    """None: the engine can load inside its passes."""
    reasons = {
        "vLLM's prefix cache is on (--no-enable-prefix-caching)": bool(
            config.cache_config.enable_prefix_caching
        ),
        "its scheduling is asynchronous (--no-async-scheduling)": bool(
            config.scheduler_config.async_scheduling
        ),
        f"the model has {len(geometry.parts)} KV cache groups": len(geometry.parts) > 1,
        "the model keeps a state": any(part.group.attention == "state" for part in geometry.parts),
        f"there are {config.parallel_config.world_size} workers": config.parallel_config.world_size
        > 1,
        "it speculates, and then vLLM asks for failed loads too early": config.speculative_config
        is not None,
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies) or None


@dataclass
class _Pass:
    """mark: the copies begin after it
    asked: layers that the pass has waited for
    failed, damaged: blocks by request
    """

    loads: list[Load]
    mark: Mark | None
    job: "Future[None] | None" = None
    reached: int = 0
    copies: list[list[Transfer]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    failed: dict[str, list[int]] = field(default_factory=dict)
    damaged: dict[str, set[int]] = field(default_factory=dict)

    def failed_blocks(self, load: Load) -> list[int]:
        return self.failed.get(load.request_id) or sorted(self.damaged.get(load.request_id, ()))


class Layerwise:
    """Only the engine's thread calls."""

    def __init__(self, part: Part, copier: Copier, loader: Executor, saver: Executor) -> None:
        self._part = part
        self._numbers = {name: number for number, name in enumerate(part.layer_names)}
        self._copier = copier
        self._loader, self._saver = loader, saver
        self._changed = Condition()
        self._pass: _Pass | None = None
        self._saving: list[Future[Transfer]] = []
        self._saved: set[int] = set()

    def use(self, copier: Copier) -> None:
        self._copier = copier

    def begin(self, loads: Sequence[Load], prepare: Prepare) -> None:
        if loads:
            self._pass = _Pass(list(loads), self._copier.mark())
            self._pass.job = self._loader.submit(self._run, self._pass, prepare)

    def wait(self, layer_name: str) -> None:
        one, number = self._pass, self._numbers.get(layer_name)
        if one is not None and number is not None:
            one.asked.add(number)
            with self._changed:
                self._changed.wait_for(lambda: one.reached > number)
            if number < len(one.copies):
                self._copier.fence(one.copies[number])

    def save(self, layer_name: str, pieces: Sequence[Piece]) -> "Future[Transfer] | None":
        number = self._numbers.get(layer_name)
        if number is None:
            return None
        self._saved.add(number)
        if not pieces:
            return None
        layers = range(number, number + 1)
        saving = self._saver.submit(self._copier.gather, pieces, self._copier.mark(), layers=layers)
        self._saving.append(saving)
        return saving

    def saved(self) -> bool:
        saving, self._saving, saved, self._saved = self._saving, [], self._saved, set()
        errors = [error for future in saving if (error := future.exception()) is not None]
        for error in errors:
            log.error("kvhold: could not copy a layer", exc_info=error)
        return not errors and len(saved) == len(self._numbers)

    def end(self) -> dict[str, list[int]]:
        one, self._pass = self._pass, None
        if one is None or one.job is None:
            return {}
        one.job.result()
        missed = len(self._numbers) - len(one.asked)
        if missed:
            log.error(
                "kvhold: vLLM did not wait for %d of %d layers; the loaded KV is computed again",
                missed,
                len(self._numbers),
            )
        for load in one.loads:
            if load.request_id in one.damaged:
                log_damage(load, one.damaged[load.request_id])
        return {
            load.request_id: blocks_of(load) if missed else one.failed_blocks(load)
            for load in one.loads
        }

    def _run(self, one: _Pass, prepare: Prepare) -> None:
        """Never raise, and end every wait."""
        with ExitStack() as stack:
            stack.callback(self._reach, one, len(self._numbers))
            claims = stack.enter_context(ExitStack())
            pieces: dict[str, list[Piece]] = {}
            submitted: list[tuple[Load, Transfer]] = []
            for load in one.loads:
                with _noting(one.failed, load):
                    pieces[load.request_id] = prepare(load, claims)
            for number in range(len(self._numbers)):
                copies: list[Transfer] = []
                for load in one.loads:
                    if load.request_id not in one.failed:
                        with _noting(one.failed, load), _keeping(claims):
                            copies.append(
                                self._copier.scatter(
                                    pieces[load.request_id],
                                    one.mark,
                                    layers=range(number, number + 1),
                                )
                            )
                            submitted.append((load, copies[-1]))
                one.copies.append(copies)
                self._reach(one, number + 1)
            for load, transfer in submitted:
                with _noting(one.failed, load), _keeping(claims):
                    self._note_damage(one, load, pieces[load.request_id], transfer.wait())

    def _note_damage(
        self,
        one: _Pass,
        load: Load,
        pieces: Sequence[Piece],
        damage: Sequence[DamagedChunks | None],
    ) -> None:
        for piece, error in zip(pieces, damage, strict=True):
            if error is not None:
                one.damaged.setdefault(load.request_id, set()).update(
                    blocks_of_chunks(error.chunks, self._part, piece.ids, piece.places)
                )

    def _reach(self, one: _Pass, layers: int) -> None:
        with self._changed:
            one.reached = max(one.reached, layers)
            self._changed.notify_all()


@contextmanager
def _noting(failed: dict[str, list[int]], load: Load) -> Iterator[None]:
    try:
        yield
    except KVHoldError as error:
        log.warning(
            "kvhold: the KV of request %s did not arrive and is computed: %s",
            load.request_id,
            error,
        )
        failed[load.request_id] = blocks_of(load)
    # `failed` tells the engine what to compute
    except Exception:
        log.exception(
            "kvhold: the KV of request %s could not be copied and is computed", load.request_id
        )
        failed[load.request_id] = blocks_of(load)


@contextmanager
def _keeping(claims: ExitStack) -> Iterator[None]:
    """After a DeviceError, let the claims keep their memory."""
    try:
        yield
    except DeviceError as error:
        claims.__exit__(type(error), error, None)
        raise


def log_damage(load: Load, blocks: Collection[int]) -> None:
    log.warning(
        "kvhold: of the %d blocks of request %s, %d are of damaged chunks; KV is computed "
        "from the first of these on",
        len(blocks_of(load)),
        load.request_id,
        len(blocks),
    )


def blocks_of_chunks(
    chunks: Sequence[int], part: Part, blocks: npt.NDArray[np.int64], places: ChunkBytes
) -> list[int]:
    """blocks: those of all chunks; -1 is not written."""
    per_chunk = -(-places.num_tokens // part.group.block_tokens)
    chosen = np.repeat(np.isin(np.arange(per_chunk.size), chunks), per_chunk)
    return [int(block) for block in blocks[chosen & (blocks >= 0)]]


def blocks_of(load: Load) -> list[int]:
    return [block for ids in load.block_ids for block in ids if block >= 0]
