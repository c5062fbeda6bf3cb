"""The bytes of one chunk on the host.

    group = Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16")
    layout = Layout(groups=(group,), tokens_per_chunk=256)

A group's chunk is contiguous: `[layer][plane][token][head][head_dim]`, or in an engine's packing
`[layer][block][block_bytes]`.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Literal, get_args

import msgspec

from kvhold.core.encoding import canonical
from kvhold.core.errors import LayoutError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

CANONICAL = "canonical"
MOST_PACKING = 32  # characters
MOST_GROUPS = 256
MOST_LAYERS = 4096  # limit of a frame's header
MOST_CHUNK_TOKENS = (1 << 32) - 1  # the same limit
MOST_CHUNK_BYTES = 1 << 36  # per group; also the limit of a frame

Attention = Literal["full", "sliding", "state"]


def packing_name(name: str) -> str:
    """A long name is cut, and ends with its digest."""
    return (
        name
        if len(name) <= MOST_PACKING
        else f"{name[:23]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"
    )


@dataclass(frozen=True)
class Group:
    """Layers that share one geometry.

    planes: 2 for K and V, 1 for a latent plane (MLA) or a state
    attention: a hit needs all chunks, the last `window` tokens, or the last chunk ("state")
    packing: CANONICAL, or an engine's opaque arrangement inside a block
    block_bytes: of one opaque block in one layer
    rotary: settings of the keys; empty if none or unknown
    """

    layers: int
    planes: int
    heads: int
    head_dim: int
    dtype: str
    attention: Attention = "full"
    window: int = 0
    packing: str = CANONICAL
    block_tokens: int = 0
    block_bytes: int = 0
    rotary: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "planes", "heads", "head_dim"):
            if getattr(self, field) < 1:
                raise LayoutError(f"group.{field} is {getattr(self, field)}; it must be 1 or more")
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(
                f"group.dtype {self.dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}"
            )
        if self.attention not in get_args(Attention):
            raise LayoutError(
                f"group.attention {self.attention!r} is unknown; known are "
                f"{', '.join(get_args(Attention))}"
            )
        if self.window < 0 or (self.attention == "sliding") != (self.window > 0):
            raise LayoutError(
                f"group.window is {self.window} with attention {self.attention!r}; only "
                "sliding attention has a window"
            )
        if not 0 < len(self.packing) <= MOST_PACKING or not all(
            "!" <= letter <= "~" for letter in self.packing
        ):
            raise LayoutError(
                f"group.packing {self.packing!r}: {CANONICAL!r}, or a name of 1 to "
                f"{MOST_PACKING} visible ASCII characters"
            )
        if self.layers > MOST_LAYERS:
            raise LayoutError(f"group.layers is {self.layers}; it must be at most {MOST_LAYERS}")
        opaque = self.packing != CANONICAL
        for field in ("block_tokens", "block_bytes"):
            if (getattr(self, field) > 0) != opaque or getattr(self, field) < 0:
                value = getattr(self, field)
                raise LayoutError(
                    f"group.{field} is {value} with packing {self.packing!r}; opaque packings "
                    "need it, and canonical packing has none"
                )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane and layer, in canonical packing."""
        return self.heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def layer_bytes(self, num_tokens: int) -> int:
        if self.packing == CANONICAL:
            return self.planes * num_tokens * self.token_bytes
        return -(-num_tokens // self.block_tokens) * self.block_bytes


@dataclass(frozen=True)
class Layout:
    """The geometry of a model's KV.

    tail_tokens: tails end at multiples, that of a hand-over at the prompt's end; 0: no tails
    """

    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MOST_GROUPS)]
    tokens_per_chunk: int = 128
    tail_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a layout needs at least one group")
        if len(self.groups) > MOST_GROUPS:
            raise LayoutError(
                f"a layout of {len(self.groups)} groups; it must have at most {MOST_GROUPS}"
            )
        if self.tokens_per_chunk < 1:
            raise LayoutError(f"tokens_per_chunk is {self.tokens_per_chunk}; it must be 1 or more")
        if self.tokens_per_chunk > MOST_CHUNK_TOKENS:
            raise LayoutError(
                f"tokens_per_chunk is {self.tokens_per_chunk}; it must be at most "
                f"{MOST_CHUNK_TOKENS}"
            )
        if self.tail_tokens < 0 or (self.tail_tokens and self.tokens_per_chunk % self.tail_tokens):
            raise LayoutError(
                f"tail_tokens {self.tail_tokens} must divide tokens_per_chunk "
                f"{self.tokens_per_chunk} (or be 0 for no tails)"
            )
        for group in self.groups:
            for field, tokens in (
                ("tokens_per_chunk", self.tokens_per_chunk),
                ("tail_tokens", self.tail_tokens),
            ):
                if group.block_tokens and tokens % group.block_tokens:
                    raise LayoutError(
                        f"{field} {tokens} must be a multiple of the engine's block of "
                        f"{group.block_tokens} tokens"
                    )
        for number in range(len(self.groups)):
            if (nbytes := self.chunk_bytes(number, self.tokens_per_chunk)) > MOST_CHUNK_BYTES:
                raise LayoutError(
                    f"a chunk of group {number} would have {nbytes} bytes, at most "
                    f"{MOST_CHUNK_BYTES} are possible: "
                    "check the group's numbers, or make tokens_per_chunk "
                    f"{self.tokens_per_chunk} smaller"
                )

    @cached_property
    def whole_bytes(self) -> int:
        return sum(
            self.chunk_bytes(number, self.tokens_per_chunk) for number in range(len(self.groups))
        )

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that identify the layout."""
        groups = [
            [
                g.layers,
                g.planes,
                g.heads,
                g.head_dim,
                g.dtype,
                g.attention,
                g.window,
                g.packing,
                g.block_tokens,
                g.block_bytes,
                g.rotary,
            ]
            for g in self.groups
        ]
        encoded = canonical(["kvhold-layout-1", self.tokens_per_chunk, self.tail_tokens, groups])
        return blake2b(encoded, digest_size=16).digest()

    def chunk_bytes(self, group: int, num_tokens: int) -> int:
        return self.groups[group].layers * self.groups[group].layer_bytes(num_tokens)

    def layer_range(self, group: int, layer: int, num_tokens: int) -> tuple[int, int]:
        """Return `(offset, length)` in bytes of a layer in a group's chunk. Raises LayoutError."""
        if not 0 <= layer < self.groups[group].layers:
            raise LayoutError(
                f"layer {layer} is not one of the {self.groups[group].layers} layers of "
                f"group {group}"
            )
        length = self.groups[group].layer_bytes(num_tokens)
        return layer * length, length

    def check_tokens(self, num_tokens: int) -> None:
        """Raise LayoutError unless this is a whole chunk or an allowed tail."""
        if num_tokens == self.tokens_per_chunk:
            return
        if not 0 < num_tokens < self.tokens_per_chunk:
            raise LayoutError(
                f"a chunk of {num_tokens} tokens; it must hold 1 to {self.tokens_per_chunk}"
            )
        if not self.tail_tokens:
            raise LayoutError(f"a tail of {num_tokens} tokens; this layout has none")
