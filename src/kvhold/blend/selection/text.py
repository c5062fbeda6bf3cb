"""Selectors as text, such as "deviation check_layer=2 of=keys ratio=0.3,0.15"."""

from typing import Any

from kvhold.blend.selection.base import Budget, Selector
from kvhold.blend.selection.deviation import DeviationSelector
from kvhold.blend.selection.first_tokens import FirstTokensSelector
from kvhold.blend.selection.nothing import NoSelection
from kvhold.blend.selection.query import QuerySelector
from kvhold.core.blend_config import BlendConfig
from kvhold.core.errors import ConfigError

SELECTORS = ("deviation", "first", "query", "none")


def make_selector(
    name: str,
    *,
    ratio: float | None = None,
    bound: float | None = None,
    check_layer: int = 1,
) -> Selector:
    """check_layer: for "deviation" only. Raises ConfigError."""
    if name == "none":
        return NoSelection()
    if name not in SELECTORS:
        raise ConfigError(f"selector is {name!r}; known are {', '.join(SELECTORS)}")
    return _make(name, (Budget(ratio=ratio, bound=bound),), check_layer)


def selector_of(config: BlendConfig) -> Selector | None:
    """None: off. Raises ConfigError."""
    if config.selector == "off":
        return None
    try:
        return make_selector(
            config.selector,
            ratio=config.ratio,
            bound=config.bound,
            check_layer=config.check_layer,
        )
    except ConfigError as error:
        raise ConfigError(f"blend.selector is {config.selector!r}: {error}") from None


def selector_text(selector: Selector) -> str:
    """Equal for selectors with equal settings."""
    settings: dict[str, str] = {}
    if selector.flow == "all":
        settings["check_layer"] = str(selector.check_layer)
    if getattr(selector, "of", "values") != "values":
        settings["of"] = str(getattr(selector, "of", ""))
    for kind in ("ratio", "bound") if selector.name != "none" else ():
        values = [getattr(budget, kind) for budget in selector.budgets]
        if any(value is not None for value in values):
            settings[kind] = ",".join("-" if v is None else repr(float(v)) for v in values)
    return " ".join([selector.name, *(f"{name}={text}" for name, text in settings.items())])


def parse_selector(text: str) -> Selector:
    """Raises ConfigError."""
    name, *parts = text.split() or [""]
    settings = dict(part.partition("=")[::2] for part in parts)
    known = {"ratio", "bound"} | ({"check_layer", "of"} if name == "deviation" else set())
    if name not in SELECTORS or (name == "none" and parts):
        raise ConfigError(f"selector is {text!r}; known are {', '.join(SELECTORS)}")
    if unknown := settings.keys() - known:
        raise ConfigError(f"selector {text!r} has no {min(unknown)!r}; known: {sorted(known)}")
    if name == "none":
        return NoSelection()
    try:
        ratios, bounds = _numbers(settings.get("ratio")), _numbers(settings.get("bound"))
        check_layer = int(settings.get("check_layer", "1"))
    except ValueError as error:
        raise ConfigError(f"selector {text!r}: {error}") from None
    count = max(len(ratios), len(bounds), 1)
    ratios, bounds = ratios or [None] * count, bounds or [None] * count
    if len(ratios) != len(bounds) or (count > 1 and name != "deviation"):
        raise ConfigError(f"selector {text!r} has a wrong number of budgets")
    budgets = tuple(Budget(ratio=r, bound=b) for r, b in zip(ratios, bounds, strict=True))
    return _make(name, budgets, check_layer, settings.get("of", "values"))


def _make(name: str, budgets: tuple[Budget, ...], check_layer: int, of: Any = "values") -> Selector:
    if name == "deviation":
        return DeviationSelector(budgets, of=of, check_layer=check_layer)
    return FirstTokensSelector(budgets[0]) if name == "first" else QuerySelector(budgets[0])


def _numbers(text: str | None) -> list[float | None]:
    if text is None:
        return []
    return [None if part == "-" else float(part) for part in text.split(",")]
