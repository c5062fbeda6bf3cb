"""A device whose streams run late, in an order that a seed draws: what lacks an event or a wait gives wrong bytes.

    device = FakeDevice(seed=7)
    device.compute(lambda: tensor.fill_(1))             # on the engine's stream, as a kernel is
    copier = FakeCopier(device)                         # for `WorkerSide`, and whoever copies
    device.synchronize()                                # all streams are empty, as after cudaDeviceSynchronize

Its memory is the host's. A stream is a queue: its operations run one after another, and between two streams there is no
order but that of events. Nothing runs by itself. Whoever waits has the device run: a random operation of a random stream
each time, until what is waited for has ended. So an operation runs as late as it may, or as early. Any thread may call.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from kvhold.core.api import ChunkBytes
from kvhold.core.errors import DamagedChunks
from kvhold.memory.copier import Mark, Piece, Transfer
from kvhold.memory.copy import gather_blocks, scatter_blocks

_HESITATION_S = 0.005


class Event:
    """Something that a stream gets to."""

    def __init__(self) -> None:
        self.fired = False


class Stream:
    """Operations in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operations: deque[Callable[[], None] | Event] = deque()  # an Event: wait for it


class FakeDevice:
    """Streams and their order."""

    def __init__(self, seed: int) -> None:
        """seed: of the order in which streams run"""
        self.engine = Stream("engine")
        self._streams = [self.engine]
        self._random = Random(seed)
        self._lock = threading.RLock()

    def new_stream(self, name: str) -> Stream:
        """One more."""
        with self._lock:
            self._streams.append(Stream(name))
            return self._streams[-1]

    def compute(self, work: Callable[[], None]) -> None:
        """Put work on the engine's stream."""
        self.put(self.engine, work)

    def put(self, stream: Stream, *operations: "Callable[[], None] | Event") -> Event:
        """Put operations on a stream, and an event behind them, which is returned."""
        event = Event()
        with self._lock:
            stream.operations += [*operations, lambda: setattr(event, "fired", True)]
        return event

    def run_some(self) -> None:
        """Run as many operations as it likes to: none, some or all."""
        with self._lock:
            while self._random.random() < 0.7 and self._step():
                pass

    def hesitate(self) -> None:
        """Let other threads go first, mostly."""
        with self._lock:
            pause_s = self._random.random() * _HESITATION_S
        time.sleep(pause_s)

    def wait(self, event: Event) -> None:
        """Run until an event has fired."""
        with self._lock:
            while not event.fired:
                assert self._step(), "the event that is waited for never fires"

    def synchronize(self) -> None:
        """Run until nothing is left."""
        with self._lock:
            while self._step():
                pass
            assert not any(stream.operations for stream in self._streams), "streams wait for each other"

    def _step(self) -> bool:
        ready = [stream for stream in self._streams if stream.operations and _is_ready(stream.operations[0])]
        if not ready:
            return False
        operation = self._random.choice(ready).operations.popleft()
        if not isinstance(operation, Event):
            operation()
        return True


def _is_ready(operation: Callable[[], None] | Event) -> bool:
    return not isinstance(operation, Event) or operation.fired


class FakeTransfer:
    """Copies on one of the device's streams."""

    def __init__(self, device: FakeDevice, num_pieces: int) -> None:
        self.event = Event()
        self.damage: list[DamagedChunks | None] = [None] * num_pieces
        self._device = device

    def done(self) -> bool:
        """See `Transfer`."""
        self._device.run_some()
        return self.event.fired

    def wait(self) -> list[DamagedChunks | None]:
        """See `Transfer`. Others may give the device work before it begins to run for this caller."""
        self._device.hesitate()
        self._device.wait(self.event)
        return self.damage


class FakeCopier:
    """A `Copier` with a stream for each direction."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._gathers, self._scatters = device.new_stream("gathers"), device.new_stream("scatters")

    def mark(self) -> Event:
        """See `Copier`."""
        return self._device.put(self._device.engine)

    def gather(self, pieces: Sequence[Piece], after: Mark | None) -> FakeTransfer:
        """See `Copier`. As on a device, no checksum is noted: the commit takes them from the arena."""
        transfer = FakeTransfer(self._device, len(pieces))

        def copy() -> None:
            for piece in pieces:
                places = ChunkBytes(piece.places.offsets, piece.places.num_tokens)
                gather_blocks(piece.view, piece.blocks, piece.buffer, places)

        return self._submit(self._gathers, transfer, copy, after)

    def scatter(self, pieces: Sequence[Piece], after: Mark | None) -> FakeTransfer:
        """See `Copier`."""
        transfer = FakeTransfer(self._device, len(pieces))

        def copy() -> None:
            for number, piece in enumerate(pieces):
                try:
                    scatter_blocks(piece.view, piece.blocks, piece.buffer, piece.places)
                except DamagedChunks as error:
                    transfer.damage[number] = error

        return self._submit(self._scatters, transfer, copy, after)

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """See `Copier`."""
        for transfer in transfers:
            assert isinstance(transfer, FakeTransfer)
            self._device.put(self._device.engine, transfer.event)

    def _submit(self, stream: Stream, transfer: FakeTransfer, copy: Callable[[], None], after: Mark | None) -> FakeTransfer:
        waits = [after] if isinstance(after, Event) else []
        transfer.event = self._device.put(stream, *waits, copy)
        self._device.run_some()
        return transfer
