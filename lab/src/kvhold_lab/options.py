import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvhold_lab.engines.models import SIZES

PICTURES = (".png", ".svg", ".pdf")

POSITIVE = click.IntRange(1)

Function = Callable[..., None]
Option = Callable[[Function], Function]


class Number(click.FloatRange):
    """No NaN, and infinity only if `infinite`."""

    def __init__(self, least: float, *, min_open: bool = False, infinite: bool = False) -> None:
        super().__init__(min=least, min_open=min_open)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value} is no number that can be used here.", param, ctx)
        return number


class OutputFile(click.Path):
    """endings: allowed suffixes"""

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


def json_option(what: str = "the rows") -> Option:
    return click.option(
        "--json", "json_file", type=OutputFile(), help=f"Write {what} to this file."
    )


def plot_option(what: str, name: str = "--plot") -> Option:
    return click.option(name, type=OutputFile(*PICTURES), help=f"Draw {what}.")


def only_option(name: str, parameter: str, what: str = "", **others: Any) -> Option:
    """Repeatable, as a tuple; empty: all."""
    text = f"Only these{what}. [default: all]"
    return click.option(name, parameter, multiple=True, help=text, **others)


def model_size_option(default: str = "small") -> Option:
    return click.option(
        "--model-size",
        type=click.Choice(list(SIZES)),
        default=default,
        show_default=True,
        help="Size of the model: tiny 5M, small 50M, mid 206M parameters.",
    )


def tokens_option(default: int | None = 4_000, *, least: int = 512, text: str = "") -> Option:
    return click.option(
        "--tokens",
        type=click.IntRange(least, 16_000),
        default=default,
        show_default=default is not None,
        help=f"Length of the prompts.{text}",
    )


def default_option(
    name: str, default: Any, what: str, kind: click.ParamType[Any] = POSITIVE
) -> Option:
    return click.option(name, type=kind, default=default, show_default=True, help=what)


def threads_option(
    what: str = "Threads of each engine; use fewer if others use the cores.",
) -> Option:
    return click.option("--threads", type=click.IntRange(1), help=f"{what} [default: all cores]")


def folder_option() -> Option:
    return click.option(
        "--folder",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder on the disk to use. [default: that of temporary files]",
    )


def peer_option() -> Option:
    return click.option(
        "--peer",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Python file by which vLLM's OffloadingConnector copies on a CPU. "
        "[default: benchmarks/vllm_host_offload.py of the checkout]",
    )


def lmcache_option() -> Option:
    return click.option(
        "--lmcache-env",
        type=click.Path(file_okay=False, path_type=Path),
        help="Virtual environment of LMCache. [default: in your cache folder]",
    )
