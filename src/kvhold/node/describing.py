from abc import ABC, abstractmethod
from typing import TypeVar

from kvhold.core.router_events import ChunkDescription
from kvhold.net import messages as m
from kvhold.node.link import Link

Kind = TypeVar("Kind", bound=m.Message)


class DescribesChunks(ABC):
    @property
    def publishes_events(self) -> bool:
        """The current node wants descriptions of chunks."""
        return (link := self._link) is not None and link.welcome.publishes

    def undescribed(self, names: bytes) -> list[int]:
        """Positions of chunks. names: joined, NAME_BYTES each"""
        return self._call(m.FindUndescribed(names), m.Undescribed, None).at

    def describe(self, chunks: list[ChunkDescription]) -> None:
        self._call(m.Describe(chunks), m.Done, None)

    @property
    @abstractmethod
    def _link(self) -> Link | None: ...

    @abstractmethod
    def _call(
        self,
        request: m.Message,
        expected: type[Kind],
        deadline_s: float | None,
        link: Link | None = None,
    ) -> Kind: ...
