"""Blocks of one piece size, and an arena with chunks of one half."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvhold.core.holdings import ChunkBytes, Lease, Reservation
from kvhold.core.layout import Group, Layout
from kvhold.memory.copier import Piece
from kvhold.memory.copy import warm_up
from kvhold.memory.views import opaque_blocks
from kvhold_lab.bench.gpu.target import Target

BLOCKS_A_CHUNK = 8
SIZES = {"8 KiB": 8 << 10, "18 KiB": 18 << 10, "64 KiB": 64 << 10, "2 MiB": 2 << 20}
_BLOCK_TOKENS = 16


class CopySample:
    """tensors: uint8 [blocks, piece_bytes], one for each layer
    stored:  the stored blocks, and all chunks
    loaded:  the loaded blocks, and these chunks
    """

    def __init__(
        self, target: Target, *, piece_bytes: int, total_bytes: int, layers: int = 32
    ) -> None:
        """total_bytes: rounded down to whole chunks"""
        chunk_bytes = layers * BLOCKS_A_CHUNK * piece_bytes
        chunks = max(1, total_bytes // chunk_bytes)
        blocks = 2 * chunks * BLOCKS_A_CHUNK
        group = Group(
            layers=layers,
            planes=2,
            heads=1,
            head_dim=8,
            dtype="int8",
            packing="bench",
            block_tokens=_BLOCK_TOKENS,
            block_bytes=piece_bytes,
        )
        self.tensors = [
            torch.randint(0, 256, (blocks, piece_bytes), dtype=torch.uint8, device=target.device)
            for _ in range(layers)
        ]
        view = opaque_blocks(group, self.tensors, block_axis=0)
        warm_up(view.device, [view])
        ids = np.random.default_rng(0).permutation(blocks)
        tokens = np.full(chunks, BLOCKS_A_CHUNK * _BLOCK_TOKENS, np.int64)
        self.buffer = target.arena(chunks * chunk_bytes)
        places = ChunkBytes(np.arange(chunks) * chunk_bytes, tokens)
        self.stored = Piece(view, ids[: blocks // 2], self.buffer, places)
        self.loaded = Piece(view, ids[blocks // 2 :], self.buffer, places)
        self._layout = Layout((group,), tokens_per_chunk=int(tokens[0]), tail_tokens=0)
        self._checksums = b""

    @property
    def nbytes(self) -> int:
        return int(self.buffer.size)

    def reserve(self) -> Reservation:
        places = self.stored.places
        return Reservation(
            places.offsets[None],
            places.num_tokens,
            self.buffer,
            self._keep,
            _nothing,
            layout=self._layout,
        )

    def store_into(self, reservation: Reservation) -> Piece:
        return replace(self.stored, places=reservation.chunks())

    def lease(self, *, checked: bool = True) -> Lease:
        places = self.loaded.places
        return Lease(
            places.offsets[None],
            places.num_tokens,
            0,
            self.buffer,
            _nothing,
            checksums=[self._checksums] if checked else None,
        )

    def load_from(self, lease: Lease) -> Piece:
        return replace(self.loaded, places=lease.chunks())

    def _keep(self, chunks: Sequence[int], checksums: bytes) -> int:
        self._checksums = checksums
        return 0


def _nothing() -> None:
    pass
