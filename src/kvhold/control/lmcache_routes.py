"""Routes for clients of LMCache's controller. An instance is a namespace (docs/control.md)."""

import ipaddress
import re
import socket
import uuid
from http import HTTPStatus
from typing import TypedDict

import msgspec

from kvhold.control.access import ControlRole, ForTenants
from kvhold.control.api import (
    MOST_TTL_S,
    ClearOrder,
    ControlApi,
    MoveOrder,
    PinOrder,
    PromptOrder,
    ReencodeOrder,
)
from kvhold.control.refusals import ControlRefusal
from kvhold.control.route import Route
from kvhold.control.rows import NamespaceFacts
from kvhold.core.status import MEMORY

_MOST_NAMESPACES = 32
_MEMORY = ("LocalCPUBackend", "ram")
_DISK = "LocalDiskBackend"
_EVERYWHERE = "all"
_GROUP = re.compile(r"layout\.groups\[\d+\]\.layers")


class LMCacheQueryInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which instance an address has.

    ip:       of this host
    event_id: comes back in the answer
    """

    ip: str
    event_id: str = ""


class LMCacheLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tokens: the prompt's"""

    tokens: list[int]


class LMCacheClear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to forget.

    instance_id: a namespace
    location:    all, LocalCPUBackend or a tier's name; LocalDiskBackend: the only one on a disk
    """

    instance_id: str
    location: str


class LMCachePin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For a week. location: LocalCPUBackend"""

    instance_id: str
    location: str
    tokens: list[int]


class LMCacheCompress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """method:   a codec
    location: a tier's name; LocalDiskBackend: the only disk
    tokens:   of a prompt; empty: all chunks of the namespace
    """

    instance_id: str
    method: str
    location: str
    tokens: list[int] | None = None


class LMCacheMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """old_position: a namespace, and LocalCPUBackend or a tier's name; LocalDiskBackend: the only
                  one on a disk
    new_position: the same; or NAMESPACE@PEER, and LocalCPUBackend
    tokens:       of a prompt; null: all of the namespace
    copy:         the old position keeps it
    """

    old_position: tuple[str, str]
    new_position: tuple[str, str]
    tokens: list[int] | None = None
    copy: bool = False


class LMCacheHealth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """instance_id: a namespace"""

    instance_id: str


class LMCacheCheckFinish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """event_id: of an answer"""

    event_id: str


class LMCacheInstance(TypedDict):
    """res: the instance"""

    event_id: str
    res: str


class LMCacheLayout(TypedDict):
    """layout_info: by instance, where most cached tokens of the prompt are, and their number"""

    event_id: str
    layout_info: dict[str, tuple[str, int]]


class LMCacheTokens(TypedDict):
    """num_tokens: changed so far"""

    event_id: str
    num_tokens: int


class LMCacheWorkers(TypedDict):
    """error_codes: by number of a shard; 0: it is served"""

    event_id: str
    error_codes: dict[str, int]


class LMCacheStatus(TypedDict):
    """status: running, done, or why it stopped"""

    status: str


async def lmcache_query_instance(api: ControlApi, order: LMCacheQueryInstance) -> LMCacheInstance:
    if not _is_of_this_host(order.ip):
        raise _not_found(f"{order.ip} is no address of this host")
    found = [row["digest"] for row in (await api.namespaces())["namespaces"]]
    if not found:
        raise _not_found("no engine has registered a namespace here")
    if len(found) > 1:
        raise _refused(f"this host has {len(found)} instances: see GET /v1/namespaces")
    return {"event_id": order.event_id or _event("query_instance"), "res": found[0]}


async def lmcache_lookup(api: ControlApi, order: LMCacheLookup) -> LMCacheLayout:
    digests = [row["digest"] for row in (await api.namespaces())["namespaces"]]
    if len(digests) > _MOST_NAMESPACES:
        raise _refused(f"this host has {len(digests)} instances: use /v1/lookup")
    layout: dict[str, tuple[str, int]] = {}
    for digest in digests:
        try:
            found = await api.lookup(PromptOrder(digest, tokens=order.tokens))
        except ControlRefusal as refusal:
            if refusal.reason != "no_namespace":
                raise
            continue  # its prompts are not named by their tokens alone
        if found["num_tokens"]:
            place = max(found["sources"], key=lambda place: found["sources"][place])
            layout[digest] = (_MEMORY[0] if place == "ram" else place, found["num_tokens"])
    return {"event_id": _event("lookup"), "layout_info": layout}


async def lmcache_clear(api: ControlApi, order: LMCacheClear) -> LMCacheTokens:
    facts = await api.namespace(order.instance_id)
    everywhere = order.location == _EVERYWHERE
    tier = "" if everywhere else await _place_of(api, order.location)
    cleared = await api.clear(ClearOrder(facts["digest"], tier=tier))
    return {"event_id": _event("clear"), "num_tokens": _tokens_of(facts, cleared["chunks"])}


async def lmcache_pin(api: ControlApi, order: LMCachePin) -> LMCacheTokens:
    if order.location not in _MEMORY:
        raise _refused(f"location {order.location[:40]!r}: pins are in {_MEMORY[0]}")
    pin = await api.pin(
        PinOrder(order.instance_id, tokens=order.tokens, ttl_s=MOST_TTL_S, owner="lmcache")
    )
    return {"event_id": f"pin-{pin['number']}", "num_tokens": pin["num_tokens"]}


async def lmcache_compress(api: ControlApi, order: LMCacheCompress) -> LMCacheTokens:
    return await _reencode(api, order, "compress", order.method)


async def lmcache_decompress(api: ControlApi, order: LMCacheCompress) -> LMCacheTokens:
    return await _reencode(api, order, "decompress", "raw")


async def lmcache_move(api: ControlApi, order: LMCacheMove) -> LMCacheTokens:
    instance, location = order.old_position
    new_instance, _, peer = order.new_position[0].partition("@")
    new_location = order.new_position[1]
    if new_instance != instance:
        raise _refused("new_position has another instance: a prompt stays in its namespace")
    if peer and new_location not in _MEMORY:
        raise _refused(f"location {new_location[:40]!r}: peers take prompts in {_MEMORY[0]}")
    source = await _place_of(api, location)
    tier = f"host:{peer}" if peer else await _place_of(api, new_location)
    tokens, whole = order.tokens, order.tokens is None
    move = MoveOrder(instance, tokens, tier=tier, copy=order.copy, source=source, all=whole)
    job = await api.move(move)
    return {"event_id": f"move-{job['number']}", "num_tokens": 0}


async def lmcache_health(api: ControlApi, order: LMCacheHealth) -> LMCacheWorkers:
    facts = await api.namespace(order.instance_id)
    await api.ready()
    shards = range(_number(facts, "shards"))
    return {"event_id": _event("health"), "error_codes": {str(shard): 0 for shard in shards}}


async def lmcache_check_finish(api: ControlApi, order: LMCacheCheckFinish) -> LMCacheStatus:
    found = re.fullmatch(r"(?:compress|decompress|move)-([0-9]{1,10})", order.event_id)
    if found is None:
        raise ControlRefusal(
            HTTPStatus.NOT_FOUND,
            "no_event",
            "only compress, decompress and move go on after their answers; everything else has "
            "finished by then",
        )
    progress = (await api.job(int(found[1])))["progress"]
    return {"status": progress["stopped"] or ("done" if progress["done"] else "running")}


async def _reencode(
    api: ControlApi, order: LMCacheCompress, event: str, codec: str
) -> LMCacheTokens:
    if not order.instance_id:
        raise _not_found("instance_id is empty")
    job = await api.reencode(
        ReencodeOrder(
            await _tier_of(api, order.location),
            codec,
            order.instance_id,
            tokens=order.tokens or None,
        )
    )
    return {"event_id": f"{event}-{job['number']}", "num_tokens": 0}


async def _place_of(api: ControlApi, location: str) -> str:
    return MEMORY if location in _MEMORY else await _tier_of(api, location)


async def _tier_of(api: ControlApi, location: str) -> str:
    tiers = await api.tiers()
    if location != _DISK:
        if any(tier["name"] == location for tier in tiers):
            return location
        names = ", ".join(tier["name"] for tier in tiers) or "none"
        raise _refused(f"location {location[:40]!r} is no tier of this node; its tiers: {names}")
    found = [tier["name"] for tier in tiers if tier["kind"] == "disk"]
    if len(found) != 1:
        raise _refused(f"this node has {len(found)} tiers on disks: name one as location")
    return found[0]


def _is_of_this_host(text: str) -> bool:
    """Raises ControlRefusal: no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ControlRefusal(
            HTTPStatus.BAD_REQUEST, "bad_request", f"ip {text[:60]!r} is no IP address"
        ) from None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))  # only an own address can be bound
        except OSError:
            return False
    return not (address.is_unspecified or address.is_multicast)


def _tokens_of(facts: NamespaceFacts, chunks: int) -> int:
    groups = sum(_GROUP.fullmatch(name) is not None for name in facts["facts"])
    per_position = max(1, groups * _number(facts, "shards"))
    return chunks // per_position * _number(facts, "layout.tokens_per_chunk")


def _number(facts: NamespaceFacts, name: str) -> int:
    text = facts["facts"].get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0


def _event(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex}"


def _not_found(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.NOT_FOUND, "no_instance", detail)


def _refused(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.CONFLICT, "refused", detail)


LMCACHE_ROUTES = (
    Route(
        "POST",
        "/query_instance",
        ControlRole.READ,
        ForTenants.OWN,
        "As LMCache: the instance at an address.",
        LMCacheInstance,
        lmcache_query_instance,
        body=LMCacheQueryInstance,
    ),
    Route(
        "POST",
        "/lookup",
        ControlRole.OPERATE,
        ForTenants.OWN,
        "As LMCache: where a prompt is cached.",
        LMCacheLayout,
        lmcache_lookup,
        body=LMCacheLookup,
    ),
    Route(
        "POST",
        "/clear",
        ControlRole.OPERATE,
        ForTenants.OWN,
        "As LMCache: forget a namespace everywhere.",
        LMCacheTokens,
        lmcache_clear,
        body=LMCacheClear,
    ),
    Route(
        "POST",
        "/pin",
        ControlRole.OPERATE,
        ForTenants.OWN,
        "As LMCache: keep a prompt's chunks in memory.",
        LMCacheTokens,
        lmcache_pin,
        body=LMCachePin,
    ),
    Route(
        "POST",
        "/compress",
        ControlRole.OPERATE,
        ForTenants.OWN,
        "As LMCache: begin to compress a tier's chunks.",
        LMCacheTokens,
        lmcache_compress,
        body=LMCacheCompress,
    ),
    Route(
        "POST",
        "/decompress",
        ControlRole.OPERATE,
        ForTenants.OWN,
        "As LMCache: begin to decompress a tier's chunks.",
        LMCacheTokens,
        lmcache_decompress,
        body=LMCacheCompress,
    ),
    Route(
        "POST",
        "/move",
        ControlRole.OPERATE,
        ForTenants.OWN,
        "As LMCache: begin to move a prompt to a tier or a peer.",
        LMCacheTokens,
        lmcache_move,
        body=LMCacheMove,
    ),
    Route(
        "POST",
        "/health",
        ControlRole.READ,
        ForTenants.OWN,
        "As LMCache: is a namespace served?",
        LMCacheWorkers,
        lmcache_health,
        body=LMCacheHealth,
    ),
    Route(
        "POST",
        "/check_finish",
        ControlRole.READ,
        ForTenants.OWN,
        "As LMCache: has an operation finished?",
        LMCacheStatus,
        lmcache_check_finish,
        body=LMCacheCheckFinish,
    ),
)
