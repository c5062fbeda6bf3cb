"""The contract of a codec.

`frame_chunk` and `unframe_chunk` are the only callers, and check every size. Plugins use the entry
point group "kvhold.codecs"; `kvhold.testing.CodecContract` tests them.
"""

from typing import ClassVar, Protocol

from kvhold.core.layout import Layout


class Codec(Protocol):
    """A transform without state, made without arguments, called concurrently.

    A layer always encodes to the same bytes, which contain the settings that a decoder needs.

    name:        1 to 16 visible ASCII characters; a new name for each format, because frames last
    error_bound: the largest |decoded - original| in a layer over its largest |original|
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    error_bound: ClassVar[float]

    def accepts(self, layout: Layout, group: int) -> bool:
        """Whether this group can be encoded. If not, `lossless` writes it."""

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        """Return the most bytes of an encoded layer."""

    def encode(
        self,
        plain: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> int:
        """Encode one layer. Return the number of bytes.

        plain: the layer as in the arena; read only
        out:   `max_size` bytes
        """

    def decode(
        self,
        encoded: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> None:
        """Decode one layer into all of `out`.

        Do not trust `encoded`: for bytes that `encode` cannot write, raise FrameError("length") or
        decode any values, in bounded memory and time.
        """
