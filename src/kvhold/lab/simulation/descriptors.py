"""The descriptors of the simulated host.

    world.descriptors.run_out(left=1)        # whoever wants more gets ENFILE

Connections of clients and nodes, and a node's spare descriptor, are counted. Files are not.
"""

import errno
import os
from math import inf


class Descriptors:
    """How many the host has left."""

    def __init__(self) -> None:
        self._left = inf

    def run_out(self, left: int) -> None:
        """From now on there are so many."""
        self._left = left

    def abound(self) -> None:
        """From now on there are enough."""
        self._left = inf

    @property
    def are_short(self) -> bool:
        """Whether the next one is refused."""
        return self._left <= 0

    def take(self) -> None:
        """One less. Raises OSError."""
        if self.are_short:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        self._left -= 1

    def put_back(self) -> None:
        """One more."""
        self._left += 1
