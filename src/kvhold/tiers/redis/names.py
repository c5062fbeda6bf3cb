"""Names of keys at the server: `kvhold:{6b65...}`, the key in hex between braces.

    names = Names("kvhold:"); names.of(key); names.key(name); names.pattern(b"first bytes")

In hex no byte means anything to a glob or a terminal. In a cluster the braces keep what else belongs to a key in the key's slot. Pure.
"""

import re
from binascii import unhexlify

from kvhold.core.keys import KEY_BYTES

_GLOB = re.compile(rb"([\\*?\[\]^-])")


class Names:
    """Names that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._length = len(self.of(bytes(KEY_BYTES)))

    def of(self, key: bytes) -> bytes:
        """Where the value of `key` is."""
        return b"%b{%b}" % (self._prefix, key.hex().encode())

    def key(self, name: bytes) -> bytes | None:
        """The key with this name; None if it is nobody's."""
        start = len(self._prefix)
        if len(name) != self._length or not name.startswith(self._prefix + b"{") or name[-1:] != b"}":
            return None
        try:
            key = unhexlify(name[start + 1 : -1])
        except ValueError:
            return None
        return key if self.of(key) == name else None

    def pattern(self, prefix: bytes) -> bytes:
        """What SCAN matches for the keys that begin with `prefix`; it may match other names, too."""
        return b"%b{%b*" % (_GLOB.sub(rb"\\\1", self._prefix), prefix.hex().encode())
