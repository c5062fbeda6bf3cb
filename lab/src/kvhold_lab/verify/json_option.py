import json
from typing import Any

import click


class JsonObject(click.ParamType[dict[str, Any]]):
    name = "JSON"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            found = json.loads(value)
        except ValueError as error:
            self.fail(f"is no JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(
                f'must be an object such as {{"trust_remote_code": true}}, not {found!r}',
                param,
                ctx,
            )
        return found
