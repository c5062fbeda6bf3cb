"""`kvhold serve --detach`. After a failed start, the caller prints the log's end, and ends with the
node's exit status.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

from kvhold.core.config import Config
from kvhold.core.errors import NodeError
from kvhold.memory.arena import default_arena_bytes
from kvhold.node.host import belong_to_host, raise_priority
from kvhold.node.logs import write_log
from kvhold.node.paths import default_socket, prepare_folder
from kvhold.node.start import log_tail
from kvhold.node.watcher import restart_when_killed, wait_for_room

log = logging.getLogger(__name__)

_MOST_BYTES = 4096  # of the ready line


def default_log(config: Config) -> Path:
    """In the folder of the socket (of a central cache: the default one).

    Raises NodeError.
    """
    if config.listen.address:
        port = config.listen.address.rpartition(":")[2]
        path = default_socket().with_name(f"central-{port}.log")
    else:
        path = Path(config.node.socket).with_suffix(".log")
    prepare_folder(path, any_owner=config.node.any_owner)
    return path


def go_on_detached(
    config: Config, log_file: Path, *, restart: bool
) -> tuple[Config, Callable[[str], None]]:
    """It has no parent, because some engines kill all descendants. Returns settings, and a function
    that prints a line in the caller's process and ends it. Raises NodeError.
    """
    ready, line = os.pipe()
    start = log_file.stat().st_size if log_file.is_file() else 0
    child = os.fork()
    if child:
        os.close(line)
        _wait(child, ready, log_file, start)
    os.setsid()
    belong_to_host(keep=(line,))
    raise_priority(config.node.nice)
    killed = False
    if restart:
        # a restarted node gets the same memory, even if less is free
        config = replace(config, ram_bytes=config.ram_bytes or default_arena_bytes())
        try:
            killed = restart_when_killed(Path(config.node.socket))
        except OSError as error:
            raise NodeError(f"node.socket: {error}") from None
    try:
        write_log(log_file, max_bytes=config.node.log_bytes, files=config.node.log_files)
    except OSError as error:
        raise NodeError(f"--log-file {log_file}: {error}") from None
    _read_nothing()

    if killed:
        log.warning("the node on %s was killed: starting it again", config.node.socket)
        wait_for_room(config, config.ram_bytes)

    def say(text: str) -> None:
        click.echo(text)
        with suppress(BrokenPipeError):  # after a restart, the first caller has ended
            os.write(line, f"{text[:_MOST_BYTES]}\n".encode())
        os.close(line)

    return config, say


def _wait(child: int, ready: int, log_file: Path, start: int) -> None:
    if text := os.read(ready, 2 * _MOST_BYTES).decode(errors="replace"):
        sys.stdout.write(f"{text}its log is {log_file}\n")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        if tail := log_tail(log_file, start):
            sys.stderr.write(f"{tail}\n")
            sys.stderr.flush()
    os._exit(max(1, os.waitstatus_to_exitcode(status)))


def _read_nothing() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
