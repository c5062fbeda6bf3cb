"""What llm-d's routing sidecar does with a request that has a prefill engine: the same bodies, byte
for byte, and headers, in the same order.

Read in its Go source: llm-d/llm-d-router at ebab6879 (62 commits after v0.10.0-rc.1),
pkg/sidecar/proxy/{chat_completions,connector_nixlv2,connector_shared_storage,connector_p2p}.go; for
`lmcache`, which it has no longer, llm-d/llm-d-routing-sidecar v0.3.1-rc.1,
internal/proxy/connector_lmcache.go. Its other connectors, `mooncake` and `sglang`, ask the prefill
engine's host for a bootstrap server.
"""

import http.client
import json
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

PREFILLER = "x-prefiller-host-port"
CONNECTORS = ("nixlv2", "shared-storage", "offloading", "lmcache")
_WITHIN_S = 600.0
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_P2P_PORT = 7777


def go_json(value: Any) -> bytes:
    """As encoding/json writes a map. All numbers have passed a float64."""
    text = json.dumps(
        _whole(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    for special in "<>&\u2028\u2029":
        text = text.replace(special, f"\\u{ord(special):04x}")
    return text.encode()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def prefill_body(connector: str, body: bytes, kv_request_id: str) -> bytes:
    request = json.loads(body, parse_int=float)
    if connector == "nixlv2":
        request["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        request |= {"stream": False, **dict.fromkeys(_LIMITS, 1)}
        request.pop("stream_options", None)
    elif connector == "offloading":
        request["kv_transfer_params"] = {"remote_decoder": {"kv_request_id": kv_request_id}}
        request |= {"max_tokens": 1, "stream": False}
        if "max_completion_tokens" in request:
            request["max_completion_tokens"] = 1
        request.pop("stream_options", None)
    else:
        request |= {"max_tokens": 1, "max_completion_tokens": 1}
        if connector == "shared-storage":
            request["cache_hit_threshold"] = 0
    return go_json(request)


def decode_body(connector: str, body: bytes, kv_request_id: str, host: str, answer: bytes) -> bytes:
    """answer: the prefill engine's"""
    request = json.loads(body, parse_int=float)
    if connector == "nixlv2":
        params = json.loads(answer, parse_int=float).get("kv_transfer_params")
        request["kv_transfer_params"] = params
    elif connector == "offloading":
        request["kv_transfer_params"] = {
            "remote_prefiller": {
                "kv_request_id": kv_request_id,
                "remote_host": host,
                "remote_port": _P2P_PORT,
            }
        }
    elif connector == "shared-storage":
        request["cache_hit_threshold"] = 0
    else:
        return body
    return go_json(request)


class Sidecar:
    """decoder: its host and port"""

    def __init__(self, connector: str, decoder: str) -> None:
        assert connector in CONNECTORS
        self._connector = connector
        self._decoder = decoder

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> str:
        """Return the decode engine's answer."""
        headers, connector = dict(headers), self._connector
        # it takes the first one, if not told to choose
        prefiller = headers.pop(PREFILLER, "").split(",")[0].strip()
        if not prefiller:
            return _post(self._decoder, path, headers, body).decode()
        kv_request_id, host = str(uuid.uuid4()), prefiller.rpartition(":")[0]
        if connector == "nixlv2":
            headers["x-request-id"] = str(uuid.uuid1())
        prefill = partial(
            _post, prefiller, path, headers, prefill_body(connector, body, kv_request_id)
        )

        def decode(answer: bytes = b"") -> str:
            own = decode_body(connector, body, kv_request_id, host, answer)
            return _post(self._decoder, path, headers, own).decode()

        if connector != "offloading":
            return decode(prefill())
        with ThreadPoolExecutor(1) as beside:
            prefilled = beside.submit(prefill)
            answer = decode()
            prefilled.result()
        return answer


def _post(engine: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    connection = http.client.HTTPConnection(engine, timeout=_WITHIN_S)
    try:
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()
