import time
from collections.abc import Container
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, TypedDict, cast

import msgspec

from kvhold.control.advice import ReasonRow, reason_rows
from kvhold.control.checksums import PromptChecksums, checksums_of
from kvhold.control.history import HistoryAnswer
from kvhold.control.jobs import JobRequest, JobRow, Jobs, MoveRequest
from kvhold.control.latency_history import LatenciesAnswer
from kvhold.control.node import ControlledNode
from kvhold.control.pins import PinRequest, PinRow, PromptPins
from kvhold.control.recorder import Recorder
from kvhold.control.refusals import ControlRefusal
from kvhold.control.rows import (
    ClientRow,
    NamespaceFacts,
    NamespaceRow,
    client_row,
    namespace_facts,
    namespace_row,
)
from kvhold.control.share_history import SharesAnswer
from kvhold.control.tokenizing import MOST_CHARACTERS, MOST_MESSAGES, ChatMessage, PromptTokenizers
from kvhold.core.errors import ConfigError, ProtocolError
from kvhold.core.keys import NAMESPACE_BYTES, Namespace, Query
from kvhold.core.planning import MOST_NAME, Decision
from kvhold.core.status import MEMORY, CacheTierStatus, NodeStatus, check_status
from kvhold.core.tags import parse_tag
from kvhold.core.usage import AGES_S, HeldAges, PromptWorth
from kvhold.node import NodeClient
from kvhold.node.namespaces import find_digest, find_namespace, namespace_for_prompts

_MOST_FLUSH_S = 60.0
MOST_TTL_S = 7 * 86400.0
_PATIENCE_S = 1.0  # for lower tiers


class ClearOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to forget, in memory and on all writable tiers: a namespace, a tag, a prompt, or all.

    namespace: first digits of its digest
    tag:       the namespaces with it; NAME=VALUE
    tier:      only there; ram is memory
    text:      with the tokenizer's special tokens
    messages:  for the model's chat template
    only_end:  keep the part that another prompt in memory continues
    """

    namespace: str = ""
    all: bool = False
    tag: str = ""
    tier: str = ""
    tokens: list[int] | None = None
    text: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)] | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MOST_MESSAGES)] | None = None
    only_end: bool = False

    @property
    def is_prompt(self) -> bool:
        return any(part is not None for part in (self.tokens, self.text, self.messages))

    def prompt(self) -> "PromptOrder":
        return PromptOrder(self.namespace, self.tokens, self.text, self.messages)


class KickOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """client: its ID such as c12; or pid: all of the process"""

    client: str = ""
    pid: int = 0


class FlushOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """timeout_s: at most 60"""

    timeout_s: float = 10.0


class ReencodeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """namespace: first digits of the only one's digest; empty: all known ones
    tokens:    only this prompt's chunks; null: all
    """

    tier: str
    codec: str
    namespace: str = ""
    tokens: list[int] | None = None


class PromptOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt: as tokens, as text without special tokens, or as messages.

    namespace: first digits of its digest
    messages:  for the model's chat template
    """

    namespace: str
    tokens: list[int] | None = None
    text: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)] | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MOST_MESSAGES)] | None = None


class PinOrder(PromptOrder, frozen=True, forbid_unknown_fields=True):
    """ttl_s: at most a week
    owner: name of the caller
    """

    ttl_s: float = 600.0
    owner: Annotated[str, msgspec.Meta(max_length=100)] = ""


class MoveOrder(PromptOrder, frozen=True, forbid_unknown_fields=True):
    """tier:   the target: its name, ram, or `host:` and a peer's name
    copy:   the source keeps them
    source: a tier's name, or ram
    all:    instead of a prompt: all chunks of the namespace
    """

    tier: str = ""
    copy: bool = False
    source: str = MEMORY
    all: bool = False


class CachedAnswer(TypedDict):
    """num_tokens: from the prompt's start
    sources:    tokens by place: ram, or a tier
    arriving:   more may be on lower tiers
    reason:     why the hit ends there; null: more may come
    """

    num_tokens: int
    sources: dict[str, int]
    arriving: bool
    reason: str | None


class PrefetchAnswer(TypedDict):
    """begun: chunks are loaded from lower tiers in the background"""

    begun: bool


class PinsAnswer(TypedDict):
    """pins: the oldest first"""

    pins: list[PinRow]


class ReasonsAnswer(TypedDict):
    """reasons: for misses"""

    reasons: list[ReasonRow]


class HealthAnswer(TypedDict):
    """status: live, ready or no_node"""

    status: str


class ClientsAnswer(TypedDict):
    """clients: by number"""

    clients: list[ClientRow]


class NamespacesAnswer(TypedDict):
    """namespaces:  those that engines registered
    others:      of requests with an adapter, a salt or tags, or of earlier engines
    other_bytes: arena bytes of the others' chunks
    tenants:     arena bytes by tenant; "": without one
    """

    namespaces: list[NamespaceRow]
    others: int
    other_bytes: int
    tenants: dict[str, int]


class HeldAnswer(TypedDict):
    """ages_s: ends of the ages
    rows:   the largest first
    """

    ages_s: list[int]
    rows: list[HeldAges]


class PromptsAnswer(TypedDict):
    """prompts: 50 of the most used of late, the most worth first"""

    prompts: list[PromptWorth]


class DecisionsAnswer(TypedDict):
    """decisions: about lookups, the latest first"""

    decisions: list[Decision]


class TagClearAnswer(TypedDict, total=False):
    """Only of a clear by tag.

    namespaces:     cleared
    unknown:        in memory, without known tags; they stay
    forgotten:      whose tags this host has forgotten
    since_s:        Unix time since when it keeps tags; null: it has no tiers
    unlisted_tiers: shared; namespaces that it has not met stay there
    """

    namespaces: int
    unknown: int
    forgotten: int
    since_s: float | None
    unlisted_tiers: list[str]


class ClearAnswer(TagClearAnswer):
    """chunks: removed from memory, before tiers"""

    chunks: int


class SettingsAnswer(TypedDict):
    """settings: those that a running node may change, by name"""

    settings: dict[str, Any]


class FlushAnswer(TypedDict):
    """done: all was written or given up in time"""

    done: bool


class JobsAnswer(TypedDict):
    """jobs: the latest first"""

    jobs: list[JobRow]


class StopAnswer(TypedDict):
    """stopped: the node ends"""

    stopped: bool


class ControlApi:
    """Each method raises ControlRefusal."""

    def __init__(
        self,
        node: ControlledNode,
        recorder: Recorder | None,
        tokenizers: PromptTokenizers,
        max_pinned_bytes: int,
    ) -> None:
        """recorder: None: no history"""
        self._node = node
        self._recorder = recorder
        self._tokenizers = tokenizers
        self._jobs = Jobs(node, recorder)
        self._pins = PromptPins(node, max_pinned_bytes)

    async def live(self) -> HealthAnswer:
        return {"status": "live"}

    async def ready(self) -> HealthAnswer:
        await self._node.call(lambda client: client.ping())
        return {"status": "ready"}

    async def status(self) -> NodeStatus:
        return await self._node.call(lambda client: check_status(client.status()))

    async def tiers(self) -> list[CacheTierStatus]:
        status: NodeStatus = await self._node.call(lambda client: check_status(client.status()))
        return status.get("tiers", [])

    async def clients(self) -> ClientsAnswer:
        found = await self._node.call(lambda client: client.clients())
        return {"clients": [client_row(one) for one in found]}

    async def kick(self, request: KickOrder) -> ClientsAnswer:
        number = _client_number(request)
        ended = await self._node.call(
            lambda client: client.kick(number=number) if number else client.kick(pid=request.pid)
        )
        if not ended:
            raise ControlRefusal(HTTPStatus.NOT_FOUND, "no_client", "the node has no such client")
        return {"clients": [client_row(one) for one in ended]}

    async def namespaces(self, prefix: str = "") -> NamespacesAnswer:
        (spaces, others, other_bytes), tenants = await self._node.call(
            lambda client: (
                client.names(prefix.lower()[: 2 * NAMESPACE_BYTES]),
                client.tenants(),
            )
        )
        return {
            "namespaces": [namespace_row(space) for space in spaces],
            "others": others,
            "other_bytes": other_bytes,
            "tenants": tenants,
        }

    async def namespace(self, digest: str) -> NamespaceFacts:
        return namespace_facts(await self._node.call(lambda client: find_namespace(client, digest)))

    async def held(self) -> HeldAnswer:
        rows = await self._node.call(lambda client: client.held())
        return {"ages_s": [*AGES_S], "rows": rows}

    async def prompts(self) -> PromptsAnswer:
        return await self._prompts("")

    async def _prompts(self, tenant: str) -> PromptsAnswer:
        return {"prompts": await self._node.call(lambda client: client.worths(tenant=tenant))}

    async def decisions(self, request: str = "") -> DecisionsAnswer:
        return await self._decisions(request, "")

    async def _decisions(self, request: str, tenant: str) -> DecisionsAnswer:
        found = await self._node.call(
            lambda client: client.explain(request[:MOST_NAME], tenant=tenant)
        )
        return {"decisions": found}

    async def history(
        self, metrics: str = "kvhold_hit_tokens,kvhold_missed_tokens", since_s: str = "3600"
    ) -> HistoryAnswer:
        return await self._history().read(metrics, since_s)

    async def shares(self, by: str = "tenant", since_s: str = "3600") -> SharesAnswer:
        return await self._history().read_shares(by, since_s, None)

    async def latencies(self, since_s: str = "3600") -> LatenciesAnswer:
        return await self._history().read_latencies(since_s)

    def _history(self) -> Recorder:
        if self._recorder is None:
            raise ControlRefusal(
                HTTPStatus.NOT_FOUND, "no_history", "control.history_interval_s is 0"
            )
        return self._recorder

    async def reasons(self) -> ReasonsAnswer:
        return {"reasons": reason_rows()}

    async def lookup(self, order: PromptOrder) -> CachedAnswer:
        """The chunks do not count as used."""
        _, query = await self._prompt(order)

        def look(client: NodeClient) -> CachedAnswer:
            with client.lookup(query, uses="none", wait_s=_PATIENCE_S) as hit:
                return {
                    "num_tokens": hit.num_tokens,
                    "sources": dict(hit.sources),
                    "arriving": hit.arriving,
                    "reason": None if hit.reason is None else str(hit.reason),
                }

        return await self._node.call(look)

    async def prefetch(self, order: PromptOrder) -> PrefetchAnswer:
        _, query = await self._prompt(order)
        await self._node.call(lambda client: client.prefetch(query))
        return {"begun": True}

    async def checksums(self, order: PromptOrder) -> PromptChecksums:
        """The chunks do not count as used."""
        namespace, query = await self._prompt(order)
        return await self._node.call(
            lambda client: checksums_of(client, namespace, query, wait_s=_PATIENCE_S)
        )

    async def pin(self, order: PinOrder) -> PinRow:
        if not 0 < order.ttl_s <= MOST_TTL_S:
            raise _bad(f"ttl_s = {order.ttl_s:g}: must be above 0, and at most {MOST_TTL_S:g}")
        namespace, query = await self._prompt(order)
        return await self._pins.pin(PinRequest(namespace, query, order.owner, order.ttl_s))

    async def pins(self) -> PinsAnswer:
        return {"pins": await self._pins.rows()}

    async def unpin(self, number: int) -> PinRow:
        return await self._pins.unpin(number)

    async def _prompt(self, order: PromptOrder) -> tuple[Namespace, Query]:
        if sum(part is not None for part in (order.tokens, order.text, order.messages)) != 1:
            raise _bad('give the prompt as one of "tokens", "text" and "messages"')
        namespace = await self._node.call(
            lambda client: namespace_for_prompts(client, order.namespace)
        )
        if order.text is not None:
            tokens = await self._tokenizers.text_tokens(namespace, order.text)
        elif order.messages is not None:
            tokens = await self._tokenizers.chat_tokens(namespace, order.messages)
        else:
            tokens = order.tokens or []
        try:
            prompt = namespace.prompt(tokens)
        except ValueError as error:
            raise _bad(f"tokens: {error}") from None
        return namespace, prompt.query()

    async def clear(self, request: ClearOrder) -> ClearAnswer:
        if [bool(request.namespace), bool(request.tag), request.all].count(True) != 1:
            raise _bad('give one of "namespace", "tag", and "all": true')
        if request.is_prompt:
            return await self._clear_prompt(request)
        if request.only_end:
            raise _bad('only_end needs a prompt: "tokens", "text" or "messages"')
        if request.tag:
            tag = _tag_of(request.tag)
            cleared = await self._node.call(
                lambda client: client.clear_tagged(
                    *tag, tier=request.tier, among=self._among(client)
                )
            )
            return cast(ClearAnswer, asdict(cleared))
        removed = await self._node.call(
            lambda client: client.clear(
                find_digest(client, request.namespace) if request.namespace else None,
                tier=request.tier,
            )
        )
        return {"chunks": removed}

    async def _clear_prompt(self, request: ClearOrder) -> ClearAnswer:
        if not request.namespace:
            raise _bad('a prompt needs a "namespace"')
        if request.tier:
            raise _bad("a prompt is cleared on all tiers; leave out tier")
        _, query = await self._prompt(request.prompt())
        only_end = request.only_end
        removed = await self._node.call(
            lambda client: client.clear_prompt(query, only_end=only_end)
        )
        return {"chunks": removed}

    def _among(self, client: NodeClient) -> Container[bytes] | None:
        return None

    async def settings(self) -> SettingsAnswer:
        return {"settings": await self._node.call(lambda client: client.settings())}

    async def change_settings(self, changes: dict[str, Any]) -> SettingsAnswer:
        def change(client: NodeClient) -> dict[str, Any]:
            quotas = changes.get("namespace_quotas")
            if isinstance(quotas, dict):
                by_digest = {
                    find_digest(client, digits).hex(): nbytes for digits, nbytes in quotas.items()
                }
                return client.settings(changes | {"namespace_quotas": by_digest})
            return client.settings(changes)

        try:
            return {"settings": await self._node.call(change)}
        except ProtocolError as error:  # such as a number of more than 64 bits
            raise _bad(str(error)) from None

    async def flush(self, request: FlushOrder) -> FlushAnswer:
        if not 0 <= request.timeout_s <= _MOST_FLUSH_S:
            raise _bad(f"timeout_s = {request.timeout_s:g}: must be from 0 to {_MOST_FLUSH_S:g}")
        until_s = time.monotonic() + request.timeout_s
        return {
            "done": await self._node.call(
                lambda client: client.flush(deadline_s=max(0.0, until_s - time.monotonic()))
            )
        }

    async def reencode(self, request: ReencodeOrder) -> JobRow:
        namespace, query = None, None
        if request.tokens is not None:
            order = PromptOrder(request.namespace, tokens=request.tokens)
            space, query = await self._prompt(order)
            namespace = space.digest
        elif request.namespace:
            namespace = await self._node.call(lambda client: find_digest(client, request.namespace))
        return await self._jobs.begin(JobRequest(request.tier, request.codec, namespace, query))

    async def move(self, order: MoveOrder) -> JobRow:
        if not order.all:
            _, query = await self._prompt(order)
            request = MoveRequest(order.tier, query, order.copy, order.source)
        elif (order.tokens, order.text, order.messages) != (None, None, None):
            raise _bad('give a prompt, or "all": true')
        else:
            space = await self._digest(order.namespace)
            request = MoveRequest(order.tier, None, order.copy, order.source, space)
        return await self._jobs.begin(request)

    async def _digest(self, digits: str) -> bytes:
        return await self._node.call(lambda client: find_digest(client, digits))

    async def jobs(self) -> JobsAnswer:
        return {"jobs": await self._jobs.rows()}

    async def job(self, number: int) -> JobRow:
        return await self._jobs.row(number)

    async def cancel(self, number: int) -> JobRow:
        return await self._jobs.cancel(number)

    async def stop(self) -> StopAnswer:
        await self._node.call(lambda client: client.stop_node())
        return {"stopped": True}


def _tag_of(text: str) -> tuple[str, str]:
    try:
        return parse_tag(text)
    except ConfigError as error:
        raise _bad(str(error)) from None


def _client_number(request: KickOrder) -> int:
    if bool(request.client) == bool(request.pid):
        raise _bad('give either "client" or "pid"')
    if not request.client:
        if not 0 < request.pid < 1 << 31:
            raise _bad(f"pid = {request.pid}: not a process id")
        return 0
    digits = request.client.removeprefix("c")
    if digits == request.client or not digits.isascii() or not digits.isdigit():
        raise _bad(f"client {request.client[:16]!r}: not an ID such as c12")
    return int(digits[:10])


def _bad(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.BAD_REQUEST, "bad_request", detail)
