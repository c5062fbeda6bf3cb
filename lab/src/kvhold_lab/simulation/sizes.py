from random import Random
from typing import Any


class DrawnSizes:
    def __init__(self, *rows: tuple[Any, str, tuple[int, ...]]) -> None:
        """module, name, and the values to draw"""
        self._rows = rows
        self._usual = [getattr(module, name) for module, name, _ in rows]

    def draw(self, random: Random) -> None:
        for module, name, sizes in self._rows:
            setattr(module, name, random.choice(sizes))

    def restore(self) -> None:
        for (module, name, _), size in zip(self._rows, self._usual, strict=True):
            setattr(module, name, size)
