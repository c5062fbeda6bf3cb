"""Make the fields of settings: `timeout_s: float = setting(5.0, "how long ...", minimum=0)`.

`core/config.py` reads them, and exports both functions.
"""

from dataclasses import field
from typing import Any


def size(default: int, help: str) -> Any:
    """Return a field that also accepts "5GiB"."""
    return field(default=default, metadata={"help": help, "size": True, "minimum": 0})


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> Any:
    """Return a field. A secret value is never in errors, logs and status."""
    return field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "secret": secret,
        },
        repr=not secret,
    )
