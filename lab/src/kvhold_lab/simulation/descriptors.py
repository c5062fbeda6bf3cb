"""The simulated host's file descriptors: connections and nodes' spare ones."""

import errno
import os
from math import inf


class Descriptors:
    def __init__(self) -> None:
        self._left = inf

    def run_out(self, left: int) -> None:
        self._left = left

    def abound(self) -> None:
        self._left = inf

    @property
    def are_short(self) -> bool:
        return self._left <= 0

    def take(self) -> None:
        if self.are_short:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        self._left -= 1

    def put_back(self) -> None:
        self._left += 1
