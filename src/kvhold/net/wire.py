"""Records on a stream: 4 bytes of length (little-endian), then msgpack.

After the greeting, 8 bytes (little-endian) before the msgpack number the record. A too long record
raises ProtocolError before memory is allocated.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from kvhold.core.errors import UNDECODABLE, KVHoldError, ProtocolError
from kvhold.net.messages import MAX_MESSAGE_BYTES

LENGTH_BYTES = 4
NUMBER_BYTES = 8
Bytes: TypeAlias = bytes | bytearray | memoryview

_MOST_QUOTED = 200  # characters of the other side in an error

_encoder = msgspec.msgpack.Encoder()
Record = TypeVar("Record")


def encode(message: msgspec.Struct, number: int | None = None) -> bytearray:
    """Raises ProtocolError: the other side could not accept it."""
    data = bytearray(LENGTH_BYTES)
    if number is not None:
        data += number.to_bytes(NUMBER_BYTES, "little")
    try:
        _encoder.encode_into(message, data, len(data))
    except (OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(f"a message cannot be encoded: {error}") from None
    length = len(data) - LENGTH_BYTES
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    data[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "little")
    return data


def body_length(prefix: Bytes, most: int = MAX_MESSAGE_BYTES) -> int:
    """Raises ProtocolError: not 1 to `most`."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 0 < length <= most:
        raise ProtocolError(f"a message of {length} bytes was announced; 1 to {most} are allowed")
    return length


def split_number(body: Bytes) -> tuple[int, Bytes]:
    if len(body) <= NUMBER_BYTES:
        raise ProtocolError(
            f"not a message of this protocol: {len(body)} bytes, which is too short for a "
            "number and a record"
        )
    return int.from_bytes(body[:NUMBER_BYTES], "little"), memoryview(body)[NUMBER_BYTES:]


class Decoder(Generic[Record]):
    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, body: Bytes) -> Record:
        """Raises ProtocolError."""
        try:
            record: Record = self._decoder.decode(body)
        except UNDECODABLE as error:
            raise ProtocolError(
                f"not a message of this protocol: {str(error)[:_MOST_QUOTED]}"
            ) from None
        except KVHoldError as error:
            raise ProtocolError(str(error)[:_MOST_QUOTED]) from None
        return record


class Splitter:
    """`most_bytes` may change between two bodies."""

    def __init__(self, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.most_bytes = most_bytes
        self._pending = bytearray()

    def feed(self, data: Bytes) -> Iterator[bytes]:
        """Complete bodies. Raises ProtocolError: a forbidden length."""
        if self._pending:
            self._pending += data
        whole = self._pending or data
        start = 0
        try:
            while len(whole) - start >= LENGTH_BYTES:
                first = start + LENGTH_BYTES
                end = first + body_length(whole[start:first], self.most_bytes)
                if len(whole) < end:
                    break
                with memoryview(whole) as view:
                    body = bytes(view[first:end])
                start = end
                yield body
        finally:
            if whole is self._pending:
                del self._pending[:start]
            elif start < len(whole):
                self._pending += whole[start:]
