"""Names: SGLang's page hashes as names of chunks, and what its KV depends on as a namespace.

SGLang names a page by a chain of SHA-256 over all tokens up to its end, seeded with the request's extra key (which holds the adapter's
id) and cache salt. That says nothing of the model, so everything else is in the namespace: the weights by their content, the settings
that shape KV, the adapters given at start by their content, the pool, its geometry, and this rank's part of the model. Each rank looks
for its own part only, because SGLang itself takes the shortest prefix over its ranks; where KV is the same on all tensor parallel ranks
(MLA), the rank is left out and they share.

A hash becomes 20 bytes by blake2b (RFC 7693), salted with the namespace: names of one namespace tell nothing about another's.
Pure functions, but for `engine_of`, which asks SGLang's runtime context and reads the weights' digests; any thread.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sglang.srt import runtime_context

from kvhold.core.errors import LayoutError
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.integrations.sglang.settings import KV_DTYPES, Settings
from kvhold.integrations.weights import model_identity

log = logging.getLogger(__name__)

_PERSON = b"kvhold-sglang-1"
_SHAPES_KV = ("dtype", "load_format", "model_impl", "quantization", "json_model_override_args", "context_length", "enable_tf32_matmul")


@dataclass(frozen=True)
class Engine:
    """What the KV of one SGLang server depends on, beside tokens, adapter and salt.

    model:    its weights
    facts:    settings that shape KV, as pairs
    kv_dtype: what a pool of bare bytes holds; empty when SGLang does not say
    """

    model: str
    facts: tuple[tuple[str, str], ...] = ()
    kv_dtype: str = ""


@dataclass(frozen=True)
class Part:
    """Which part of the model's KV a process has: (rank, size) of tensor, pipeline, context and decode context parallelism."""

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


def engine_of(settings: Settings) -> Engine:
    """The engine this process is part of. Raises LayoutError when its weights or its adapters cannot be told."""
    model_id = settings.config.model_id
    try:
        args = runtime_context.get_server_args()
    except ValueError:  # not within a server
        if not model_id:
            raise LayoutError("model_id must be set: SGLang's settings are not published here, so the weights cannot be told") from None
        return Engine(model_id, kv_dtype=settings.kv_dtype)
    facts = [(name, str(getattr(args, name, None))) for name in _SHAPES_KV]
    if args.load_format == "dummy":
        facts.append(("random_seed", str(args.random_seed)))
    facts += [("adapter", _adapter(ref)) for ref in args.lora_paths or ()]
    if args.quantization_param_path:
        facts.append(("scales", _file_digest(args.quantization_param_path)))
    model = model_id or model_identity(args.model_path, args.revision)
    return Engine(model, tuple(facts), settings.kv_dtype or KV_DTYPES.get(str(args.kv_cache_dtype), ""))


def namespace_of(engine: Engine, layout: Layout, part: Part, *, pool: str, replicated: bool, salt: str = "") -> Namespace:
    """The namespace of one pool's pages.

    replicated: all tensor parallel ranks have the same KV
    salt:       what else tells the pool's bytes from others', in text
    """
    ranks = {"pp": part.pp, "cp": part.cp, "dcp": part.dcp} | ({} if replicated else {"tp": part.tp})
    tags = [("engine", "sglang"), ("pool", pool), ("replicated", str(replicated)), ("format", salt)]
    tags += [(name, f"{rank} of {size}") for name, (rank, size) in sorted(ranks.items())]
    return Namespace(model=engine.model, layout=layout, tags=(*tags, *engine.facts), hashing="sglang-sha256-1")


def names_of(namespace: Namespace, keys: Sequence[str], prefix_keys: Sequence[str] | None) -> ChunkNames:
    """Pages to be stored, in the order of their prompt.

    prefix_keys: those of the pages before them, from the prompt's start; None when SGLang does not say. Then they are taken for a
                 prompt's first, which eviction alone minds.
    """
    before = [] if prefix_keys is None else list(prefix_keys)
    return ChunkNames(
        namespace=namespace.digest,
        hashes=_hashes(namespace, keys),
        first_token=len(before) * namespace.layout.tokens_per_chunk,
        parent=_hashes(namespace, before[-1:]),
    )


def query_of(namespace: Namespace, keys: Sequence[str]) -> Query:
    """Pages to be looked up, in order."""
    return Query(namespace.digest, namespace.layout.fingerprint, 1, _hashes(namespace, keys), tenant=namespace.tenant)


def check_keys(keys: Sequence[object]) -> None:
    """Raise ValueError for what cannot be a hash of SGLang's, before anything is done."""
    for number, key in enumerate(keys):
        if not isinstance(key, str) or not key:
            raise ValueError(f"keys[{number}] is {key!r}; a page's hash, as text, was expected")


def _hashes(namespace: Namespace, keys: Sequence[str]) -> bytes:
    salt = namespace.digest
    return b"".join(blake2b(key.encode(), digest_size=HASH_BYTES, salt=salt, person=_PERSON).digest() for key in keys)


def _adapter(ref: Any) -> str:
    """An adapter given at start, whose id SGLang makes of name and path: its content has to be told too."""
    try:
        return f"{ref.lora_id} {model_identity(ref.lora_path, None)}"
    except LayoutError as error:
        raise LayoutError(f"lora_paths: {error}") from None


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a settings file, small
            return blake2b(file.read(), digest_size=16).hexdigest()
    except OSError as error:
        raise LayoutError(f"quantization_param_path: {error}") from None
