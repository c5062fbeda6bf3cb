"""`kvhold:{6b65...}`: the key in hex. Braces keep a value's parts in its key's cluster slot."""

import re
from binascii import unhexlify

from kvhold.core.keys import KEY_BYTES

_GLOB = re.compile(rb"([\\*?\[\]^-])")


class RedisNames:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._length = len(self.of(bytes(KEY_BYTES)))

    def of(self, key: bytes) -> bytes:
        return b"%b{%b}" % (self._prefix, key.hex().encode())

    def key(self, name: bytes) -> bytes | None:
        start = len(self._prefix)
        if (
            len(name) != self._length
            or not name.startswith(self._prefix + b"{")
            or name[-1:] != b"}"
        ):
            return None
        try:
            key = unhexlify(name[start + 1 : -1])
        except ValueError:
            return None
        return key if self.of(key) == name else None

    def pattern(self, prefix: bytes) -> bytes:
        """For SCAN. It may match other names, too."""
        return b"%b{%b*" % (_GLOB.sub(rb"\\\1", self._prefix), prefix.hex().encode())
