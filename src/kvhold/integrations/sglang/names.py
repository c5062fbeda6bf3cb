"""Page hashes become chunk names, the engine's settings a namespace.

blake2b (RFC 7693), salted with the namespace, shortens a page's hash to 20 bytes.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from sglang.srt import runtime_context

from kvhold.core.errors import ConfigError, LayoutError
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.naming import NO_FACTS, Facts, NamingRules, walk
from kvhold.integrations.machine import (
    device_facts,
    library_facts,
    processor_facts,
    version_facts,
)
from kvhold.integrations.sglang.settings import KV_DTYPES, SGLangSettings
from kvhold.integrations.sglang.tables import SERVER_ARGS, VARIABLES
from kvhold.integrations.weights import adapter_identity, model_identity

log = logging.getLogger(__name__)

_PERSON = b"kvhold-sglang-1"
_RULES = NamingRules(atoms={torch.dtype: str})
_LIBRARIES = (
    "sglang",
    "torch",
    "transformers",
    "sgl-kernel",
    "sglang-kernel",
    "flashinfer-python",
    "triton",
    "flash-attn",
)
SHARES = {
    "versions": ("versions.",),
    "cpu": ("cpu.",),
    "device": ("device.",),
    "tensor_parallel": ("sglang.tp_size",),
    "data_parallel": ("sglang.dp_size", "sglang.attn_dp_size"),
    "expert_parallel": ("sglang.ep_size",),
    "environment": ("environment.",),
}
"""Words of the setting `share`, and the facts that each word leaves out. A final dot: a prefix."""


@dataclass(frozen=True)
class SGLangEngine:
    """kv_dtype: of a pool that SGLang declares as bytes; empty: unknown"""

    model: str
    facts: Facts = NO_FACTS
    kv_dtype: str = ""
    title: str = field(default="", compare=False)


@dataclass(frozen=True)
class PagePart:
    """(rank, size) each"""

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


def engine_of(settings: SGLangSettings) -> SGLangEngine:
    """Raises LayoutError: unidentified weights or adapters."""
    model_id = settings.config.model_id
    try:
        args = runtime_context.get_server_args()
    except ValueError:
        if not model_id:
            raise LayoutError(
                "model_id must be set: SGLang's settings are not published here, so the "
                "weights cannot be identified"
            ) from None
        return SGLangEngine(model_id, kv_dtype=settings.kv_dtype)
    facts = _server_facts(args, settings)
    for number, ref in enumerate(args.lora_paths or ()):
        facts[f"adapters[{number}]"] = repr(_adapter(ref))
    if args.quantization_param_path:
        facts["scales"] = repr(_file_digest(args.quantization_param_path))
    if args.load_format == "dummy":
        facts["sglang.random_seed"] = repr(args.random_seed)
    model = model_id or model_identity(args.model_path, args.revision, cache_dir=args.download_dir)
    kv_dtype = settings.kv_dtype or KV_DTYPES.get(str(args.kv_cache_dtype), "")
    return SGLangEngine(model, Facts.of(facts), kv_dtype, title=str(args.model_path))


def _server_facts(args: Any, settings: SGLangSettings) -> dict[str, str]:
    shared = tuple(name for word in settings.config.share for name in SHARES.get(word, (word,)))
    for word in settings.config.share:
        if word not in SHARES and not word.startswith("sglang."):
            raise ConfigError(
                f"share: {word!r} is neither one of {', '.join(SHARES)} nor a fact that "
                "begins with sglang."
            )
    facts: dict[str, str] = {}
    given = {name: getattr(args, name) for name in args.__struct_fields__}
    resolved = {
        name: value
        for _, changes in getattr(args, "_resolved_overrides", ())
        for name, value in changes.items()
    }
    rules = replace(_RULES, shared=shared)
    for prefix, values in (("sglang", given), ("sglang.resolved", resolved)):
        for name, value in values.items():
            if name not in SERVER_ARGS.harmless and f"sglang.{name}" not in shared:
                walk(value, f"{prefix}.{name}", rules, facts)
    facts |= {
        **version_facts(*_LIBRARIES),
        **processor_facts(),
        **device_facts(str(args.device or "cpu")),
        **library_facts(),
        **_environment(),
    }
    return {
        name: text
        for name, text in facts.items()
        if not name.startswith(tuple(s for s in shared if s.endswith(".")))
    }


def _environment() -> dict[str, str]:
    named = (
        name
        for name in sorted(os.environ)
        if name.startswith(("SGLANG_", "SGL_")) and name not in VARIABLES
    )
    return {f"environment.{name}": repr(os.environ[name]) for name in named}


def namespace_of(
    engine: SGLangEngine,
    layout: Layout,
    part: PagePart,
    *,
    pool: str,
    replicated: bool,
    salt: str = "",
) -> Namespace:
    """replicated: all tensor parallel ranks have the same KV
    salt: further text that identifies the bytes
    """
    ranks = {"pp": part.pp, "cp": part.cp, "dcp": part.dcp} | (
        {} if replicated else {"tp": part.tp}
    )
    tags = [("engine", "sglang"), ("pool", pool), ("replicated", str(replicated)), ("format", salt)]
    tags += [(name, f"{rank} of {size}") for name, (rank, size) in sorted(ranks.items())]
    return Namespace(
        model=engine.model,
        layout=layout,
        tags=tuple(tags),
        hashing="sglang-sha256-1",
        facts=engine.facts,
        title=engine.title,
    )


def names_of(
    namespace: Namespace, keys: Sequence[str], prefix_keys: Sequence[str] | None
) -> ChunkNames:
    """prefix_keys: hashes of the preceding pages; None: unknown"""
    before = [] if prefix_keys is None else list(prefix_keys)
    return ChunkNames(
        namespace=namespace.digest,
        hashes=_hashes(namespace, keys),
        first_token=len(before) * namespace.layout.tokens_per_chunk,
        parent=_hashes(namespace, before[-1:]),
    )


def query_of(namespace: Namespace, keys: Sequence[str]) -> Query:
    return Query(
        namespace.digest,
        namespace.layout.fingerprint,
        1,
        _hashes(namespace, keys),
        tenant=namespace.tenant,
    )


def check_keys(keys: Sequence[object]) -> None:
    for number, key in enumerate(keys):
        if not isinstance(key, str) or not key:
            raise ValueError(f"keys[{number}] is {key!r}; a page's hash, as text, was expected")


def _hashes(namespace: Namespace, keys: Sequence[str]) -> bytes:
    salt = namespace.digest
    return b"".join(
        blake2b(key.encode(), digest_size=HASH_BYTES, salt=salt, person=_PERSON).digest()
        for key in keys
    )


def _adapter(ref: Any) -> str:
    """Name the content, too: SGLang's id covers name and path only."""
    try:
        return f"{ref.lora_id} {adapter_identity(ref.lora_path)}"
    except LayoutError as error:
        raise LayoutError(f"lora_paths: {error}") from None


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a settings file, small
            return blake2b(file.read(), digest_size=16).hexdigest()
    except OSError as error:
        raise LayoutError(f"quantization_param_path: {error}") from None
