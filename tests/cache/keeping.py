"""What chunks that are kept in memory must satisfy at every moment."""

from typing import Any

from kvhold.cache.kept_chunks import KeptChunks


def assert_books_of_kept_agree(kept: KeptChunks[Any], names: set[bytes], most_bytes: int) -> None:
    """names: that something keeps"""
    assert names == kept._keepers.keys() == kept._bytes.keys()
    assert names >= kept._entries.keys()
    granted_bytes = sum(kept._bytes.values())
    assert granted_bytes == sum(kept._bytes_by.values()) == kept._all_bytes
    kept_bytes = sum(entry.taken_bytes for entry in kept.entries())
    assert kept_bytes <= granted_bytes <= most_bytes
