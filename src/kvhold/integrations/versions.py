import logging

log = logging.getLogger(__name__)

TESTED = {"vLLM": ("0.30", "0.31", "0.32"), "SGLang": ("0.5.23",), "transformers": ("5.19",)}
"""Tested versions by engine. "0.32" stands for 0.32.1 too."""

_said: set[str] = set()


def is_tested(engine: str, version: str) -> bool:
    parts = version.partition("+")[0].split(".")
    return any(parts[: tested.count(".") + 1] == tested.split(".") for tested in TESTED[engine])


def warn_if_untested(engine: str, version: str) -> None:
    if is_tested(engine, version) or engine in _said:
        return
    _said.add(engine)
    log.warning(
        "kvhold: %s %s is not a tested version (%s %s). A setting that kvhold does not know "
        "gives the KV another name. Before you rely on this version, run: kvhold verify",
        engine,
        version,
        ", ".join(TESTED[engine]),
        "is" if len(TESTED[engine]) == 1 else "are",
    )
