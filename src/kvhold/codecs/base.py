"""The contract of a codec.

Only `kvhold.codecs.chunk` calls a codec; it checks every size. `kvhold.testing.CodecContract` tests
plugins (entry point group "kvhold.codecs").
"""

from typing import ClassVar, Protocol

from kvhold.core.layout import Layout


class Codec(Protocol):
    """A stateless transform. The class takes no arguments; threads share the object.

    A layer always encodes to the same bytes.

    name:        1 to 16 visible ASCII characters; each format needs its own
    error_bound: limit of a layer's largest |decoded - original| / largest |original|
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    error_bound: ClassVar[float]

    def accepts(self, layout: Layout, group: int) -> bool:
        """Whether the codec can encode this group. If not, `lossless` encodes it."""

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        """Of an encoded layer, in bytes."""

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
        """One layer; returns the bytes.

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
        """One layer, into all of `out`.

        For bytes that `encode` cannot write, raise FrameError("length") or write arbitrary values,
        in bounded memory and time.
        """
