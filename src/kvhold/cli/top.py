"""One status call per refresh."""

import json
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import socket_option
from kvhold.cli.top_view import TopFigures, at_its_start, figures, is_same_run, lines
from kvhold.core.errors import ConfigError, KVHoldError
from kvhold.core.naming import unpack
from kvhold.core.status import NodeStatus, check_status
from kvhold.node import NodeClient

_SCREEN, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_CTRL_C = "\x03"


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, help="Seconds."
)
@click.option("--once", is_flag=True, help="Show one interval, and end; needs no terminal.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    help="Also append each refresh to this file, one JSON object a line; - for standard output.",
)
@socket_option
def command(interval: float, once: bool, json_file: Path | None, socket: str | None) -> None:
    """Show what the node does now: hit rate, tiers, clients, busiest namespaces and tenants.

    Ends with q or Ctrl-C.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    to_output = json_file is not None and str(json_file) == "-"
    if not once and (to_output or not is_terminal):
        raise click.UsageError("this needs a terminal, or --once")
    with connect(socket, "kvhold top") as client, _opened(json_file) as file:
        if once:
            _once(client, interval, file, shows=not to_output)
        else:
            _follow(client, interval, file)


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        with click.open_file(str(path), "a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


class _Watch:
    def __init__(self, client: NodeClient, file: IO[str] | None) -> None:
        self._client = client
        self._file = file
        self._before: NodeStatus | None = None
        self._titles: dict[str, str] = {}

    def refresh(self) -> TopFigures:
        """The first is of the node's whole run. Raises KVHoldError."""
        now = check_status(self._client.status())
        before = self._before
        if before is None or not is_same_run(before, now):
            before = at_its_start(now)
        self._before = now
        self._learn_titles(now)
        shown = figures(before, now, self._titles, time.time())
        if self._file is not None:
            self._file.write(json.dumps(asdict(shown)) + "\n")
            self._file.flush()
        return shown

    def begin(self) -> None:
        self._before = check_status(self._client.status())

    def _learn_titles(self, status: NodeStatus) -> None:
        """Asked for once, when an unknown namespace is among the busiest."""
        unknown = {one["namespace"] for one in status["busiest_namespaces"]} - self._titles.keys()
        if unknown:
            self._titles |= dict.fromkeys(unknown, "")
            spaces, _, _ = self._client.names()
            self._titles |= {one.digest.hex(): unpack(one.description).title for one in spaces}


def _once(client: NodeClient, interval_s: float, file: IO[str] | None, *, shows: bool) -> None:
    watch = _Watch(client, file)
    watch.begin()
    time.sleep(interval_s)
    shown = watch.refresh()
    if shows:
        click.echo("\n".join(lines(shown)))


def _follow(client: NodeClient, interval_s: float, file: IO[str] | None) -> None:
    watch = _Watch(client, file)
    with _screen() as keys:
        while True:
            try:
                shown = watch.refresh()
                width, _ = shutil.get_terminal_size()
                page = lines(shown, width=width)
                page[0] = f"{page[0]}, every {interval_s:g} s; q ends"[:width]
            except KVHoldError as error:
                page = [f"no node: {error}; q ends"]
            _draw(page)
            if _ends(keys, time.monotonic() + interval_s):
                return


def _draw(page: Sequence[str]) -> None:
    width, height = shutil.get_terminal_size()
    body = f"{_TO_LINE_END}\r\n".join(line[:width] for line in page[: height - 1])
    sys.stdout.write(f"{_HOME}{body}{_TO_LINE_END}{_TO_END}")
    sys.stdout.flush()


def _ends(keys: int, until_s: float) -> bool:
    while (left_s := until_s - time.monotonic()) > 0:
        ready, _, _ = select.select([keys], [], [], left_s)
        if ready:
            pressed = os.read(keys, 64).decode(errors="replace")
            if not pressed or "q" in pressed.lower() or _CTRL_C in pressed:
                return True
    return False


@contextmanager
def _screen() -> Iterator[int]:
    import termios
    import tty

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        sys.stdout.write(_SCREEN)
        yield keys
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        sys.stdout.write(_BACK)
        sys.stdout.flush()
