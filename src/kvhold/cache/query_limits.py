from collections.abc import Callable, Sequence
from itertools import pairwise

from kvhold.cache.reservations import MAX_SHARDS
from kvhold.core.errors import ConfigError, ProtocolError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, Query, is_span
from kvhold.core.layout import Layout
from kvhold.core.planning import MOST_SPANS as MOST_SPANS

_MOST_KEYS = 1 << 20  # per query: 100 MB of keys
_MOST_ROWS = 1 << 12  # groups times shards, which some steps visit


def check_span_queries(queries: Sequence[Query], find_layout: Callable[[bytes], Layout]) -> None:
    """Raises ConfigError; ProtocolError for an invalid query."""
    if len(queries) > MOST_SPANS:
        raise ConfigError(f"{len(queries)} spans; at most {MOST_SPANS} are looked up at once")
    num_keys = sum(check_query(find_layout(query.layout), query) for query in queries)
    if num_keys > _MOST_KEYS:
        raise ConfigError(
            f"{len(queries)} spans of {num_keys} keys; the limit is {_MOST_KEYS}: look up fewer "
            "or shorter spans"
        )
    for number, query in enumerate(queries):
        if not is_span(query.namespace):
            raise ConfigError(
                f"spans[{number}] has the namespace of exact prompts; use Namespace.of_spans"
            )


def check_query(layout: Layout, query: Query) -> int:
    """Return the number of keys. Raises ProtocolError."""
    if (
        len(query.namespace) != NAMESPACE_BYTES
        or len(query.hashes) % HASH_BYTES
        or not 1 <= query.shards <= MAX_SHARDS
    ):
        raise ProtocolError(
            f"a query with {len(query.namespace)} bytes of namespace, {len(query.hashes)} bytes of "
            f"hashes and {query.shards} shards; needed are {NAMESPACE_BYTES} bytes, a multiple of "
            f"{HASH_BYTES} bytes and 1 to {MAX_SHARDS} shards"
        )
    if query.only and not (
        all(first < second for first, second in pairwise(query.only))
        and 0 <= query.only[0]
        and query.only[-1] < query.shards
    ):
        raise ProtocolError(
            f"a query whose `only` does not name some of {query.shards} shards in order, each once"
        )
    if len(query.tail_hashes) != len(query.tail_lengths) * HASH_BYTES:
        raise ProtocolError(
            f"a query with {len(query.tail_hashes)} bytes of tail_hashes and "
            f"{len(query.tail_lengths)} tail_lengths; each tail needs one length and a hash of "
            f"{HASH_BYTES} bytes"
        )
    if not all(0 < length < layout.tokens_per_chunk for length in query.tail_lengths):
        raise ProtocolError(
            f"a query's tail_lengths must be 1 to {layout.tokens_per_chunk - 1} tokens: a chunk "
            f"has {layout.tokens_per_chunk}"
        )
    num_rows = len(layout.groups) * query.num_shards
    num_keys = (len(query.hashes) // HASH_BYTES + len(query.tail_lengths)) * num_rows
    if num_rows > _MOST_ROWS:
        raise ProtocolError(
            f"a query of {num_keys} keys, of {len(layout.groups)} groups in {query.num_shards} "
            f"shards; groups times shards must be {_MOST_ROWS} at most"
        )
    if num_keys > _MOST_KEYS:
        raise ProtocolError(
            f"a query of {num_keys} keys ({len(query.hashes) // HASH_BYTES} chunks, "
            f"{len(query.tail_lengths)} tails, {len(layout.groups)} "
            f"groups, {query.num_shards} shards); the limit is {_MOST_KEYS}: look up a shorter "
            "prompt"
        )
    return num_keys
