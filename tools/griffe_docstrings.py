"""A Griffe extension for docs/api.md: kvhold's docstrings as Markdown.

    ticket:   0 when nothing was found          ->  - `ticket`: 0 when nothing was found
    arriving: the hit may still grow;               - `arriving`: the hit may still grow; ask again
              ask again

A setting shows its default, and its help is its docstring.
"""

import ast
import re
from typing import Any

import griffe

_ITEM = re.compile(r"(\w+(?:, \w+)*):\s+(\S.*)")
_SETTINGS = ("setting", "size")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if isinstance(obj, griffe.Attribute) and (text := _help(obj.value)):
            obj.docstring = griffe.Docstring(text, parent=obj)
            assert isinstance(obj.value, griffe.ExprCall)
            obj.value = obj.value.arguments[0]
        elif obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Make a list of each run of `name: description` lines."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        item = _ITEM.fullmatch(line)
        if item and item[1] not in ("Raises", "Returns"):
            if not in_list:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"- {names}: {item[2]}")
            in_list = True
        elif in_list and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            in_list = in_list and not line.strip()
            lines.append(line)
    return "\n".join(lines)


def _help(value: Any) -> str:
    """The second argument of `kvhold.core.setting.setting`."""
    if not isinstance(value, griffe.ExprCall) or str(value.function) not in _SETTINGS:
        return ""
    call = ast.parse(str(value), mode="eval").body
    match call:
        case ast.Call(args=[_, ast.Constant(value=str(text))]):
            return text
    return ""
