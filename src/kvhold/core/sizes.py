import re
from decimal import Decimal

_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    # "4g" means GiB, as in redis and docker
    _FACTORS[_letter] = _FACTORS[f"{_letter}ib"] = 1024**_power
    _FACTORS[f"{_letter}b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Units are binary. Raises ValueError."""
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise ValueError(
            f"{text!r} is not a size; write bytes or a number with a unit, such as 5GiB"
        )
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative; a size is 0 or more bytes")
        return text
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(
            f"{text!r} is not a size; write bytes or a number with a unit, such as 5GiB, "
            "512MiB or 2GB"
        )
    return int(Decimal(match[1]) * _FACTORS[match[2].lower()])


def format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
