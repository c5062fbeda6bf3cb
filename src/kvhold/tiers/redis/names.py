"""Names of keys at the server: `kvhold:{6b65...}`, with the key in hex between braces.

    names = Names("kvhold:"); names.of(key); names.key(name); names.pattern(b"first bytes")

Hex has no special characters for globs and terminals. In a cluster, the braces keep the parts of a
value in the slot of its key. Pure.
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
        """Return the name of the value of `key`."""
        return b"%b{%b}" % (self._prefix, key.hex().encode())

    def key(self, name: bytes) -> bytes | None:
        """Return the key of a name; None if the name is not one of this tier's."""
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
        """Return the SCAN pattern for keys that begin with `prefix`; other names may match, too."""
        return b"%b{%b*" % (_GLOB.sub(rb"\\\1", self._prefix), prefix.hex().encode())
