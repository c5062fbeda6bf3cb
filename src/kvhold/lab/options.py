"""Types of options that several commands have."""

from typing import TYPE_CHECKING, Any

import click

from kvhold.core.sizes import parse_size

if TYPE_CHECKING:
    _Parameter = click.ParamType[int]
else:
    _Parameter = click.ParamType  # click has not always been generic


class Size(_Parameter):
    """The type of an option: bytes, or a number with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
