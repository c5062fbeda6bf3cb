"""Option types."""

import math
import os
from pathlib import Path
from typing import Any

import click

PICTURES = (".png", ".svg", ".pdf")


class Number(click.FloatRange):
    """A number within bounds; no NaN, and infinity only if `infinite`."""

    def __init__(self, least: float, *, min_open: bool = False, infinite: bool = False) -> None:
        super().__init__(min=least, min_open=min_open)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value} is no number that can be used here.", param, ctx)
        return number


class OutputFile(click.Path):
    """A file written at the end of a run, checked before it. endings: allowed suffixes."""

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}; make it first.", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"{path}: the folder {path.parent} cannot be written to.", param, ctx)
        if self._endings and path.suffix not in self._endings:
            self.fail(
                f"{path}: its name must end in one of {', '.join(self._endings)}.", param, ctx
            )
        return path
