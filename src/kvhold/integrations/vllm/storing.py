import logging
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache

from kvhold.core.errors import DeviceError, KVHoldError
from kvhold.core.holdings import Reservation
from kvhold.core.tracing import OpenSpan
from kvhold.integrations.vllm.steps import Store
from kvhold.memory.coding import infinite_chunks
from kvhold.memory.copier import Piece, Transfer, wait_for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reserving:
    store: Store
    shard: int
    reservation: "Future[Reservation | None]"
    pieces: list[Piece] = field(default_factory=list)
    layers: "list[Future[Transfer]]" = field(default_factory=list)
    span: OpenSpan | None = None

    def layer_copies(self) -> list[Transfer]:
        """Call it after the pass."""
        return [layer.result() for layer in self.layers if layer.exception() is None]

    def has_lost_copies(self) -> bool:
        return any(isinstance(layer.exception(), DeviceError) for layer in self.layers)


@dataclass
class Reading:
    """is_whole: they cover all granted chunks
    is_lost: the device failed and may still write
    """

    transfers: list[Transfer]
    pieces: list[Piece] = field(default_factory=list)
    is_whole: bool = False
    is_lost: bool = False
    nbytes: int = 0


def settle(one: Reserving, read: "Future[Reading] | None") -> None:
    stored = _Stored()
    try:
        _settle(one, read, stored)
    finally:
        if one.span is not None:
            one.span.end({"kvhold.stored_chunks": stored.chunks, "kvhold.bytes": stored.nbytes})


@dataclass
class _Stored:
    chunks: int = 0
    nbytes: int = 0


def _settle(one: Reserving, read: "Future[Reading] | None", stored: _Stored) -> None:
    reservation = None if one.reservation.cancelled() else one.reservation.result()
    if reservation is None:
        return
    try:
        reading = read.result() if read is not None else Reading(one.layer_copies())
    except CancelledError:
        reading = Reading(one.layer_copies())
    reading.is_lost = reading.is_lost or one.has_lost_copies()
    try:
        wait_for(reading.transfers)
    except DeviceError:
        reading.is_lost = True
    # after any error, the chunks are not committed
    except Exception:
        reading.is_whole = False
        log.exception("kvhold: chunks of request %s were not stored", one.store.request_id)
    if reading.is_lost:
        reservation.keep()
        return
    with reservation:
        try:
            if reading.is_whole:
                infinite = {
                    chunk for piece in reading.pieces for chunk in infinite_chunks(piece.planned)
                }
                if infinite:
                    _warn_of_infinity()
                chunks = [chunk for chunk in reservation.granted if chunk not in infinite]
                reservation.commit(chunks)
                stored.chunks, stored.nbytes = len(chunks), reading.nbytes
        except KVHoldError as error:
            log.warning("kvhold: chunks were not stored: %s", error)


@cache
def _warn_of_infinity() -> None:
    log.warning(
        "kvhold: memory_codec cannot encode KV with an infinity or a NaN; such "
        "chunks are not stored"
    )
