import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvhold.core.errors import ConfigError
from kvhold.core.sizes import parse_size
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.interruption import ending_in_order
from kvhold_lab.options import Number, default_option, json_option, threads_option
from kvhold_lab.verify.blend.command import command as blend
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.json_option import JsonObject
from kvhold_lab.verify.paths import DEFAULT, PATHS
from kvhold_lab.verify.rows import VerifyRow, table
from kvhold_lab.verify.run import Subject, Verification, VerifySettings

_SMALL: dict[str, Any] = {"block_size": 32}
_SMALL_CHUNK = 64
_SMALL_LENGTH = 2_048
_SMALL_KV = 64 << 20


class _Names(click.ParamType[tuple[str, ...]]):
    name = "NAMES"

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        names = (
            value
            if isinstance(value, tuple)
            else tuple(part.strip() for part in value.split(",") if part.strip())
        )
        unknown = [name for name in names if name not in self._known]
        if unknown or not names:
            self.fail(
                f"{', '.join(unknown) or 'nothing'} is not one of {', '.join(self._known)}",
                param,
                ctx,
            )
        return names


class _Classes(_Names):
    def __init__(self) -> None:
        super().__init__(())

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        from kvhold_lab.checkpoints import RECIPES

        self._known = list(RECIPES)
        return super().convert(value, param, ctx)


class _Verify(click.Command):
    """With --blend it is another command, with options of its own."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if "--blend" not in args:
            return super().make_context(info_name, args, parent, **extra)
        others = [argument for argument in args if argument != "--blend"]
        return blend.make_context(f"{info_name} --blend", others, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=_Verify)
@click.argument("model", required=False)
@click.option(
    "--blend",
    is_flag=True,
    expose_value=False,
    help="Measure blend, and write permits; see kvhold verify --blend --help.",
)
@click.option(
    "--all-classes",
    is_flag=True,
    help="Verify every class of models, on small checkpoints that are made here.",
)
@click.option("--classes", type=_Classes(), help="Only these classes, such as llama,gemma3.")
@default_option(
    "--paths", ",".join(DEFAULT), f"Paths to run, of {', '.join(PATHS)}.", _Names(list(PATHS))
)
@json_option()
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="Type of the model. With other types, tokens may differ from run to run without kvhold, "
    "too.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Folder of a LoRA adapter.",
)
@click.option(
    "--config",
    type=JsonObject(),
    default={},
    help="kvhold's settings, as in kv_connector_extra_config.",
)
@click.option(
    "--engine-args",
    type=JsonObject(),
    default={},
    help="Further engine arguments of vLLM; they override those of a path.",
)
@default_option(
    "--max-model-len", 4_096, "Most tokens of a prompt and its answer.", click.IntRange(min=64)
)
@click.option("--kv-memory", default="1GiB", show_default=True, help="The engine's own KV memory.")
@threads_option("Threads of the engine.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(1),
    default=900.0,
    show_default=True,
    help="Seconds that a start or a batch may take.",
)
def command(
    model: str | None,
    all_classes: bool,
    classes: tuple[str, ...] | None,
    paths: tuple[str, ...],
    json_file: Path | None,
    dtype: str,
    adapters: tuple[str, ...],
    config: dict[str, Any],
    engine_args: dict[str, Any],
    max_model_len: int,
    kv_memory: str,
    threads: int | None,
    timeout_s: float,
) -> None:
    """Compare MODEL with and without kvhold: every token of the answers, every bit of loaded KV.

    Exits with 1 unless every row passed. Paths that vLLM does not run or turns off, and with
    --all-classes refused rows, fail only when nothing else passed.
    """
    if (model is None) == (not all_classes and classes is None):
        raise click.UsageError("give a MODEL, or --all-classes, or --classes NAMES")
    if not is_vllm_available():
        raise ConfigError(
            "vLLM is not installed here; kvhold verify runs the model in it: see docs/vllm.md"
        )
    settings = VerifySettings(
        dtype=dtype,
        config=config,
        max_model_len=max_model_len,
        kv_memory_bytes=parse_size(kv_memory),
    )
    with (
        ending_in_order(),
        Engines(timeout_s=timeout_s, threads=threads or len(os.sched_getaffinity(0))) as engines,
    ):
        if model is not None:
            found = _of_model(
                engines, Subject(model, model, engine_args, tuple(adapters)), paths, settings
            )
        else:
            found = _of_classes(engines, classes, paths, settings, engine_args)
        rows: list[VerifyRow] = []
        _write(rows, json_file)
        for row in found:
            rows.append(row)
            click.echo(f"  {row.outcome}{': ' + row.reason.splitlines()[0] if row.reason else ''}")
            _write(rows, json_file)
    click.echo(f"\n{table(rows)}")
    if not _is_good(rows, refusals_count=model is not None):
        click.echo("kvhold verify: FAILED", err=True)
        sys.exit(1)


def _of_model(
    engines: Engines, subject: Subject, paths: tuple[str, ...], settings: VerifySettings
) -> Iterator[VerifyRow]:
    return Verification(engines, subject, paths=paths, settings=settings, say=click.echo).rows()


def _of_classes(
    engines: Engines,
    classes: tuple[str, ...] | None,
    paths: tuple[str, ...],
    settings: VerifySettings,
    engine_args: dict[str, Any],
) -> Iterator[VerifyRow]:
    from kvhold_lab.checkpoints import RECIPES, make_checkpoint

    small = replace(
        settings,
        max_model_len=_SMALL_LENGTH,
        kv_memory_bytes=_SMALL_KV,
        config={"tokens_per_chunk": _SMALL_CHUNK} | settings.config,
    )
    for name in classes or RECIPES:
        checkpoint = make_checkpoint(name)
        arguments = _SMALL | checkpoint.recipe.engine | engine_args
        of_class = replace(small, dtype=arguments.pop("dtype", small.dtype))
        subject = Subject(
            name, str(checkpoint.path), arguments, tuple(map(str, checkpoint.adapters))
        )
        yield from Verification(
            engines, subject, paths=paths, settings=of_class, say=click.echo
        ).rows()


def _write(rows: Sequence[VerifyRow], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")


def _is_good(rows: Sequence[VerifyRow], *, refusals_count: bool) -> bool:
    outcomes = {row.outcome for row in rows}
    return (
        "pass" in outcomes
        and "FAIL" not in outcomes
        and not (refusals_count and "refused" in outcomes)
    )
