"""The contract of a codec, which encodes and decodes one layer of a chunk.

    n = codec.encode(plain, out, layout=layout, group=0, layer=3, num_tokens=256)
    codec.decode(out[:n], plain, layout=layout, group=0, layer=3, num_tokens=256)

Each layer is encoded alone, so that a reader can fetch one layer, and so that reading, decoding and
computing overlap. A codec is called through `frame_chunk` and `unframe_chunk` only. They check
every size, so a codec need not. `kvhold.testing.CodecContract` is the conformance suite. A plugin
registers its class in the entry point group "kvhold.codecs".
"""

from typing import ClassVar, Protocol

from kvhold.core.layout import Layout


class Codec(Protocol):
    """One transform. Made without arguments, keeps no state between calls, called concurrently.

    The same layer always encodes to the same bytes. These bytes contain all settings of the encoder
    that a decoder needs.

    name:        1 to 16 visible ASCII characters, in the header of every frame. Frames outlive
                 releases, so a new format needs a new name
    lossless:    decoding returns the same bytes, for any bytes
    error_bound: the largest |decoded - original| in a layer over its largest |original|, for finite
                 values; 0.0 if lossless. A codec's docstring may promise a smaller error
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    error_bound: ClassVar[float]

    def accepts(self, layout: Layout, group: int) -> bool:
        """Return whether chunks of this group can be encoded.

        For example, an opaque packing cannot be quantised. Chunks of other groups are written by
        `lossless`.
        """

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        """Return the most bytes that an encoded layer of `num_tokens` tokens can have."""

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
        """Encode one layer and return the number of encoded bytes.

        plain: the layer as in the arena, `Group.layer_bytes(num_tokens)` bytes; read only
        out:   `max_size` bytes, filled from the front; bytes behind the result may be overwritten
        layer: number within the group
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
        """Decode one layer.

        Do not trust `encoded`: its checksum is verified, but its writer may have been wrong. For
        bytes that `encode` cannot write, raise FrameError("length") or decode any values, in
        bounded memory and time.

        encoded: the bytes that `encode` wrote
        out:     `Group.layer_bytes(num_tokens)` bytes; write all of them
        """
