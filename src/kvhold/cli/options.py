from typing import TYPE_CHECKING, Any

import click

from kvhold.core.sizes import parse_size

if TYPE_CHECKING:
    _Parameter = click.ParamType[int]
else:
    _Parameter = click.ParamType


socket_option = click.option(
    "--socket", help="Path of the node's Unix socket. [default: this user's]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


class Size(_Parameter):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
