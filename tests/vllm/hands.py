"""The worker's side of an engine without a model: `Hands`, which loads when the test says so, or
`RealHands`, the real connector of a worker.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvhold.core.api import ABSENT
from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.layout import Layout
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.node import NodeClient

if TYPE_CHECKING:  # this file also runs on commits that have no such class
    from kvhold.core.holdings import Reservation


class Worker(Protocol):
    """What runs beside a pass."""

    def run(self, output: SchedulerOutput, compute: Callable[[], None]) -> KVConnectorOutput:
        """One pass with the connector's steps around it."""

    def enter(self, layer: str) -> None:
        """In the pass, before the layer's blocks are read; what is new has been written."""

    def leave(self, layer: str) -> None:
        """In the pass, after the layer's blocks were read."""

    def close(self) -> None:
        """Leave the node."""


class Hands:
    """The worker's side as the test plays it: stores at once, loads when `finish_loads` is told to
    (by default at once too).
    """

    def __init__(
        self, layout: Layout, slots: npt.NDArray[np.int64], socket: Path, client: ClientConfig
    ) -> None:
        self._layout = layout
        self._slots = slots
        self.client = NodeClient(socket, client, name="test-worker")
        self.hold = False  # keep loads until it is False again
        self.holds_stores = False  # copy, and leave the commit to `finish_stores`
        self.storing: list[Reservation] = []
        self.fail = False  # report loads as failed, without making them
        self.waiting: list[Load] = []
        self.gone: list[Load] = []  # loads whose hit was not there any more
        self.granted_chunks = 0

    def run(self, output: SchedulerOutput, compute: Callable[[], None]) -> KVConnectorOutput:
        steps = output.kv_connector_metadata
        assert isinstance(steps, Steps)
        for ids in getattr(steps, "zeroed", ()):  # some commits have none
            self._slots[ids] = 0
        compute()
        for store in steps.stores:
            self._store(store)
        stored = {store.request_id for store in steps.stores if store.last}
        self.waiting += steps.loads
        if self.hold:
            return KVConnectorOutput(finished_sending=stored)
        ended, self.waiting = self.waiting, []
        failed: set[int] = set()
        for load in ended:
            failed |= self._load(load)
        loaded = {load.request_id for load in ended}
        return KVConnectorOutput(
            finished_sending=stored, finished_recving=loaded, invalid_block_ids=failed
        )

    def finish_stores(self, *, commit: bool = True) -> None:
        """Commit what was copied, or abandon it."""
        storing, self.storing = self.storing, []
        for reservation in storing:
            with reservation:
                if commit:
                    reservation.commit()

    def enter(self, layer: str) -> None:
        pass

    def leave(self, layer: str) -> None:
        pass

    def close(self) -> None:
        self.finish_stores(commit=False)
        self.client.close()

    def _store(self, store: Store) -> None:
        per_chunk = self._layout.tokens_per_chunk // self._layout.tail_tokens
        counts = store.names.num_tokens(self._layout)
        blocks = [
            store.block_ids[0][i : i + per_chunk]
            for i in range(0, len(store.block_ids[0]), per_chunk)
        ]
        assert len(blocks) == len(store.names)
        for ids, count in zip(blocks, counts, strict=True):
            assert not self._slots[ids].ravel()[count:].any(), "KV of another request"
        try:
            reservation = self.client.reserve(self._layout, store.names)
            for chunk in reservation.granted:
                memory = self._rows(
                    reservation.buffer,
                    int(reservation.chunks().offsets[chunk]),
                    len(blocks[chunk]),
                )
                memory[:] = self._slots[blocks[chunk]]
            self.granted_chunks += len(reservation.granted)
            self.storing.append(reservation)
            if not self.holds_stores:
                self.finish_stores()
        except KVHoldError:
            return

    def _load(self, load: Load) -> set[int]:
        wanted = {block for block in load.block_ids[0] if block >= 0}
        if self.fail:
            return wanted
        try:
            lease = self.client.claim(load.ticket, first_chunk=load.first_chunk)
        except KVHoldError:
            lease = None
        if lease is None:
            self.gone.append(load)
            return wanted
        with lease:
            block_ids = deque(load.block_ids[0])
            places = lease.chunks()
            for offset, tokens in zip(places.offsets, places.num_tokens, strict=True):
                assert offset != ABSENT
                for row in self._rows(
                    lease.buffer, int(offset), -(-int(tokens) // self._layout.tail_tokens)
                ):
                    if (block := block_ids.popleft()) >= 0:
                        self._slots[block] = row
            assert not block_ids, "as many blocks as the lease has"
            lease.verify(self._layout)
        return set()

    def _rows(
        self, buffer: npt.NDArray[np.uint8], offset: int, blocks: int
    ) -> npt.NDArray[np.int64]:
        """[blocks, tokens]: the first layer's numbers of one chunk in the arena."""
        size = self._layout.groups[0].block_bytes
        return (
            buffer[offset : offset + blocks * size]
            .view(np.int64)
            .reshape(blocks, -1)[:, : self._slots.shape[1]]
        )


class RealHands:
    """The real connector of a worker, called as vLLM's own runner calls it."""

    def __init__(
        self, config: VllmConfig, kv_config: KVCacheConfig, tensors: dict[str, torch.Tensor]
    ) -> None:
        self._config = config
        self.connector = KVHoldConnector(config, KVConnectorRole.WORKER, kv_config)
        self.connector.register_kv_caches(tensors)

    def run(self, output: SchedulerOutput, compute: Callable[[], None]) -> KVConnectorOutput:
        from vllm.forward_context import set_forward_context

        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            with (
                set_forward_context(None, self._config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connected,
            ):
                compute()
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        assert connected is not None
        return connected

    def enter(self, layer: str) -> None:
        if self.connector.has_connector_metadata():
            self.connector.wait_for_layer_load(layer)

    def leave(self, layer: str) -> None:
        if self.connector.has_connector_metadata():
            self.connector.save_kv_layer(layer, torch.empty(0), None)

    def close(self) -> None:
        self.connector.shutdown()
