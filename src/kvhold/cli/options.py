"""Option types."""

from typing import TYPE_CHECKING, Any

import click

from kvhold.core.sizes import parse_size

if TYPE_CHECKING:
    _Parameter = click.ParamType[int]
else:
    _Parameter = click.ParamType


class Size(_Parameter):
    """Bytes, or a number with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
