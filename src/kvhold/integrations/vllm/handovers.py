"""Prefill and decode on two engines: a request's `kv_transfer_params`.

Of vLLM's NixlConnector and p2p tier, ids, hosts and block numbers are neither read nor sent
(docs/decisions/0037). `wait_for` runs on the lookup thread, the rest on the scheduler's.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvhold.core.config import ClientConfig
from kvhold.core.errors import ConfigError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, Prompt
from kvhold.core.planning import HandoverWait
from kvhold.integrations.vllm.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

HANDED = "kvhold_handed"
"""kvhold's own field of the parameters: a `HandedPrompt`."""

_MOST_CAUSES = 20


class HandedPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """namespace:  its digest
    num_tokens: at the beginning of the prompt
    last:       hash of the last whole chunk; empty: there is only a tail
    """

    namespace: Annotated[str, msgspec.Meta(max_length=2 * NAMESPACE_BYTES)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    last: Annotated[str, msgspec.Meta(max_length=2 * HASH_BYTES)] = ""

    def is_of(self, prompt: Prompt) -> bool:
        """A prompt of the same namespace begins with the same chunks."""
        whole = self.num_tokens // prompt.namespace.layout.tokens_per_chunk
        return whole <= prompt.num_whole and (
            not whole or prompt.hash_at(whole - 1).hex() == self.last
        )


@dataclass(frozen=True)
class HandoverPart:
    """produces:    another engine decodes
    answers:     the request's end names the handed-over KV
    awaits:      another engine computes the prompt
    is_parallel: both got the request at the same time
    handed:      the KV that the other engine has named
    """

    produces: bool = False
    answers: bool = False
    awaits: bool = False
    is_parallel: bool = False
    handed: HandedPrompt | None = None


WHOLE_REQUEST = HandoverPart()
"""One engine computes and decodes."""


class Handovers:
    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._told: set[str] = set()

    def part_of(self, request: "Request") -> HandoverPart:
        """Wrong parameters count as none."""
        try:
            return _read(request.kv_transfer_params)
        except ConfigError as error:
            self._warn_once(f"kv_transfer_params.{error}")
            return WHOLE_REQUEST

    def wait_for(self, part: HandoverPart, prompt: Prompt) -> HandoverWait | None:
        """None: a lookup does not wait for the prefill engine."""
        if not part.awaits:
            return None
        handed, config = part.handed, self._config
        if handed is not None and handed.namespace != prompt.namespace.digest.hex():
            self._warn_once(
                f"kv_transfer_params.{HANDED}: the prefill engine names its KV differently, so "
                "this engine computes it; `kvhold names` shows the difference"
            )
            return None
        if handed is not None and not handed.is_of(prompt):
            log.debug("kvhold: %s is that of another prompt", HANDED)
            return None
        return HandoverWait(
            config.handover_timeout_s, config.handover_grace_s if part.is_parallel else 0.0
        )

    def _warn_once(self, cause: str) -> None:
        if cause not in self._told and len(self._told) < _MOST_CAUSES:
            self._told.add(cause)
            log.warning("kvhold: %s; the request is served without a hand-over", cause)


def answer(part: HandoverPart, request_id: str, tracker: RequestTracker) -> dict[str, Any] | None:
    """Parameters for the decode engine; None: nothing is handed over."""
    num_tokens = tracker.cached_tokens
    if not part.answers or not num_tokens:
        return None
    prompt = tracker.prompt
    whole = num_tokens // prompt.namespace.layout.tokens_per_chunk
    handed = HandedPrompt(
        prompt.namespace.digest.hex(),
        num_tokens,
        prompt.hash_at(whole - 1).hex() if whole else "",
    )
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": request_id,
        "remote_num_tokens": num_tokens,
        # nothing can be fetched there, and no engine tries to
        "remote_block_ids": [],
        "remote_host": "127.0.0.1",
        "remote_port": 0,
        HANDED: msgspec.to_builtins(handed),
    }


def engine_fields(config: "VllmConfig") -> dict[str, Any]:
    parallel = config.parallel_config
    return {
        "remote_engine_id": config.kv_transfer_config.engine_id,
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
    }


def _read(params: Mapping[str, Any] | None) -> HandoverPart:
    if not params:
        return WHOLE_REQUEST
    decodes_elsewhere = _flag(params, "do_remote_decode")
    computed_elsewhere = _flag(params, "do_remote_prefill")
    has_decoder = _is_named(params, "remote_decoder")
    has_prefiller = _is_named(params, "remote_prefiller")
    # LMCache's; its receiver's addresses are not read
    has_receiver = _is_named(params, "disagg_spec")
    produces = decodes_elsewhere or has_decoder or has_receiver
    awaits = computed_elsewhere or has_prefiller
    if produces and awaits:
        raise ConfigError(
            "do_remote_prefill: the request (or remote_prefiller) says that another engine "
            "computes the prompt, and do_remote_decode, remote_decoder or disagg_spec that another "
            "one decodes; give only one of the two parts"
        )
    return HandoverPart(
        produces=produces,
        answers=decodes_elsewhere,
        awaits=awaits,
        is_parallel=has_prefiller,
        handed=_handed(params) if awaits else None,
    )


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name}: must be true or false")
    return bool(value)


def _is_named(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}: must be an object")
    return value is not None


def _handed(params: Mapping[str, Any]) -> HandedPrompt | None:
    value = params.get(HANDED)
    if value is None:
        return None
    try:
        return msgspec.convert(value, HandedPrompt)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{HANDED}: {error}; pass it on as the prefill engine has answered it"
        ) from None
