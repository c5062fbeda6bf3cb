import json
import os
from pathlib import Path

import click

from kvhold.cli.lmcache import PREFIX, migrate, values_of
from kvhold.cli.lmcache_values import Migration
from kvhold.cli.options import json_option
from kvhold.core.config import read_settings
from kvhold.core.errors import ConfigError


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="Write the settings to this new file."
)
@json_option
def command(file: Path | None, output: Path | None, as_json: bool) -> None:
    """Translate LMCache's settings to a settings file of kvhold, with a comment for each.

    FILE is LMCache's YAML file. Without it: the file in LMCACHE_CONFIG_FILE, or else the variables
    LMCACHE_*.
    """
    migration = migrate(_values(file))
    text = _as_json(migration) if as_json else migration.as_toml()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x") as written:
            written.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from None
    click.echo(f"{output}: set KVHOLD_CONFIG={output}, and try it with `kvhold doctor`")


def _values(file: Path | None) -> dict[str, object]:
    named = os.environ.get(f"{PREFIX}CONFIG_FILE")
    if file is None and named:
        file = Path(named)
    if file is not None:
        return read_settings(file)
    values = values_of(os.environ)
    if not values:
        raise ConfigError("name LMCache's settings file; the environment has no variable LMCACHE_*")
    return values


def _as_json(migration: Migration) -> str:
    return json.dumps({"settings": migration.settings, "notes": migration.notes}, indent=2) + "\n"
