"""Limits of chunks' memory. 0: no limit."""

from dataclasses import dataclass, field


@dataclass
class MemoryLimits:
    """total_bytes:     of all namespaces
    namespace_bytes: of each namespace, unless `of_namespaces` has its own limit
    """

    total_bytes: int = 0
    namespace_bytes: int = 0
    of_namespaces: dict[bytes, int] = field(default_factory=dict)

    def of(self, namespace: bytes) -> int:
        return self.of_namespaces.get(namespace, self.namespace_bytes)
