"""The contract of a codec: how one layer of a chunk becomes bytes that leave the arena, and comes back.

    n = codec.encode(plain, out, layout=layout, group=0, layer=3, num_tokens=256)
    codec.decode(out[:n], plain, layout=layout, group=0, layer=3, num_tokens=256)

A layer at a time, each by itself, so that reading, decoding and computing overlap and one layer's range is enough. Not called directly
but through `frame_chunk` and `unframe_chunk`, which check every size, so a codec need not. `kvhold.testing.CodecContract` is the
conformance suite. A plugin names its class under the entry point group "kvhold.codecs".
"""

from typing import ClassVar, Protocol

from kvhold.core.layout import Layout


class Codec(Protocol):
    """One transform. Made without arguments; holds no state between calls; called from several threads at once.

    The same layer always gives the same bytes, and those bytes alone are enough to decode: whatever encode was set to stands in them.

    name:        1 to 16 visible ASCII characters, in the header of every frame. New bytes need a new name: frames outlive releases
    lossless:    decoding gives back the same bytes, whatever they are
    error_bound: the largest |decoded - original| in a layer over the largest |original| in it, for finite values; 0.0 if lossless.
                 A docstring may promise more
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    error_bound: ClassVar[float]

    def accepts(self, layout: Layout, group: int) -> bool:
        """Whether chunks of this group can be encoded (an opaque packing, say, cannot be quantised). What is not accepted stays raw."""

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        """The most bytes that one layer of `num_tokens` tokens can encode to."""

    def encode(self, plain: memoryview, out: memoryview, *, layout: Layout, group: int, layer: int, num_tokens: int) -> int:
        """Encode one layer and return how many bytes it took.

        plain: the layer as in the arena, `Group.layer_bytes(num_tokens)` bytes; read only
        out:   `max_size` bytes, to be filled from the front; what lies behind the result is free to be scribbled on
        layer: counts within the group
        """

    def decode(self, encoded: memoryview, out: memoryview, *, layout: Layout, group: int, layer: int, num_tokens: int) -> None:
        """Decode one layer.

        encoded: what encode returned, its checksum verified; yet its writer may have been wrong, so nothing in it is believed: bytes
                 that encode could not have made raise FrameError("length"), or give some values, but nothing else, in bounded
                 memory and time
        out:     `Group.layer_bytes(num_tokens)` bytes, all of them to be written
        """
