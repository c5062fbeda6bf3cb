"""The protocols that hand a prefill engine's KV over to a decode engine.

The parameters go into `kv_transfer_params` of the two requests. No I/O.
"""

import uuid
from typing import Any, Protocol

import msgspec

from kvhold.core.errors import UNDECODABLE, KVHoldError
from kvhold.proxy.engines import ProxiedEngine

Params = dict[str, Any]


class HandoverFailed(KVHoldError): ...


class Handover(Protocol):
    """is_parallel: the decode engine does not wait for the prefill
    is_for_one:  it hands over one prompt for one answer only
    is_reusable: a second decode engine may get the same parameters
    """

    is_parallel: bool
    is_for_one: bool
    is_reusable: bool

    def prefill_params(self, handover_id: str) -> Params: ...

    def decode_params(self, engine: ProxiedEngine, handover_id: str, answer: bytes) -> Params:
        """engine: of the prefill
        answer: its JSON; empty if `is_parallel`

        Raises HandoverFailed.
        """
        ...


class SharedHandover:
    """Both engines find KV by content: in one node, by tiers or peers."""

    is_parallel = False
    is_for_one = False
    is_reusable = True

    def prefill_params(self, handover_id: str) -> Params:
        return {}

    def decode_params(self, engine: ProxiedEngine, handover_id: str, answer: bytes) -> Params:
        return {}


class NixlHandover:
    """vLLM's NixlConnector: the answer names blocks, which the first fetch frees."""

    is_parallel = False
    is_for_one = True
    is_reusable = False

    def prefill_params(self, handover_id: str) -> Params:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, engine: ProxiedEngine, handover_id: str, answer: bytes) -> Params:
        try:
            found = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
        except (msgspec.ValidationError, *UNDECODABLE) as error:
            raise HandoverFailed(f"its answer is not that of a completion: {error}") from None
        if not found:
            raise HandoverFailed("its answer has no kv_transfer_params")
        return found


class PeerHandover:
    """The decode engine fetches while the prefill engine computes."""

    is_parallel = True
    is_for_one = True
    is_reusable = False

    def prefill_params(self, handover_id: str) -> Params:
        return {"remote_decoder": {"kv_request_id": handover_id}}

    def decode_params(self, engine: ProxiedEngine, handover_id: str, answer: bytes) -> Params:
        assert engine.peer is not None
        host, port = engine.peer
        return {
            "remote_prefiller": {
                "kv_request_id": handover_id,
                "remote_host": host,
                "remote_port": port,
            }
        }


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_HANDOVERS: dict[str, type[Handover]] = {
    "shared": SharedHandover,
    "nixl": NixlHandover,
    "p2p": PeerHandover,
}


def make_handover(protocol: str) -> Handover:
    return _HANDOVERS[protocol]()


def new_handover_id() -> str:
    """Never the client's, which may repeat."""
    return uuid.uuid4().hex
