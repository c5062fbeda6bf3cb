"""What the tests of the cache's state share: an arena that is only a size, and typed commands."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TypeAlias, TypeVar, cast

from kvhold.cache.transfer.commands import Command
from kvhold.memory.arena import Arena

Asked: TypeAlias = tuple[int, int, int]  # space, text and number of tokens of a prompt
C = TypeVar("C")


def arena_of(nbytes: int) -> Arena:
    """An arena without memory. The state looks at its size alone."""
    return cast(Arena, SimpleNamespace(nbytes=nbytes))


def only(commands: Iterable[Command], kind: type[C]) -> C:
    """The one command, which is of this kind."""
    [command] = all_of(commands, kind)
    return command


def all_of(commands: Iterable[object], kind: type[C]) -> list[C]:
    """The commands, which are all of this kind."""
    given = list(commands)
    chosen = [command for command in given if isinstance(command, kind)]
    assert len(chosen) == len(given)
    return chosen
