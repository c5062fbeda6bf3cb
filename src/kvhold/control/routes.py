"""For the server and the OpenAPI document."""

from typing import Any

from kvhold.control import api
from kvhold.control.access import ControlRole
from kvhold.control.checksums import PromptChecksums
from kvhold.control.history import HistoryAnswer
from kvhold.control.jobs import JobRow
from kvhold.control.lmcache_routes import LMCACHE_ROUTES
from kvhold.control.pins import PinRow
from kvhold.control.route import Route
from kvhold.control.rows import NamespaceFacts
from kvhold.core.status import NodeStatus

_API = api.ControlApi

ROUTES = (
    Route(
        "GET", "/health/live", ControlRole.NONE, "Does the API answer?", api.HealthAnswer, _API.live
    ),
    Route(
        "GET",
        "/health/ready",
        ControlRole.NONE,
        "Does the node answer?",
        api.HealthAnswer,
        _API.ready,
    ),
    Route("GET", "/v1/status", ControlRole.READ, "The node's status.", NodeStatus, _API.status),
    Route(
        "GET",
        "/v1/clients",
        ControlRole.READ,
        "The node's clients.",
        api.ClientsAnswer,
        _API.clients,
    ),
    Route(
        "POST",
        "/v1/kick",
        ControlRole.OPERATE,
        "End clients. A live process joins again.",
        api.ClientsAnswer,
        _API.kick,
        body=api.KickOrder,
    ),
    Route(
        "GET",
        "/v1/namespaces",
        ControlRole.READ,
        "The namespaces that the node knows.",
        api.NamespacesAnswer,
        _API.namespaces,
        query={"prefix": "Only those whose digest begins with these digits."},
    ),
    Route(
        "GET",
        "/v1/namespaces/{digest}",
        ControlRole.READ,
        "What a namespace is made of.",
        NamespaceFacts,
        _API.namespace,
    ),
    Route(
        "GET",
        "/v1/decisions",
        ControlRole.READ,
        "The node's latest decisions about lookups.",
        api.DecisionsAnswer,
        _API.decisions,
        query={"request": "Only of requests whose id contains this."},
    ),
    Route(
        "GET",
        "/v1/history",
        ControlRole.READ,
        "Metrics over time.",
        HistoryAnswer,
        _API.history,
        query={
            "metrics": "Their names, with commas between; counters and gauges.",
            "since_s": "Seconds back from now; at most 30 days.",
        },
    ),
    Route(
        "GET",
        "/v1/reasons",
        ControlRole.READ,
        "The reasons for misses, and what to do about each.",
        api.ReasonsAnswer,
        _API.reasons,
    ),
    Route(
        "POST",
        "/v1/lookup",
        ControlRole.OPERATE,
        "What is cached of a prompt, and where.",
        api.CachedAnswer,
        _API.lookup,
        body=api.PromptOrder,
    ),
    Route(
        "POST",
        "/v1/prefetch",
        ControlRole.OPERATE,
        "Load a prompt's chunks from lower tiers into memory.",
        api.PrefetchAnswer,
        _API.prefetch,
        body=api.PromptOrder,
    ),
    Route(
        "POST",
        "/v1/checksums",
        ControlRole.OPERATE,
        "Checksums of a prompt's cached chunks, which are read and checked.",
        PromptChecksums,
        _API.checksums,
        body=api.PromptOrder,
    ),
    Route("GET", "/v1/pins", ControlRole.READ, "The pins.", api.PinsAnswer, _API.pins),
    Route(
        "POST",
        "/v1/pins",
        ControlRole.OPERATE,
        "Keep a prompt's chunks in memory for a time.",
        PinRow,
        _API.pin,
        body=api.PinOrder,
        status=201,
    ),
    Route("DELETE", "/v1/pins/{number}", ControlRole.OPERATE, "End a pin.", PinRow, _API.unpin),
    Route(
        "POST",
        "/v1/clear",
        ControlRole.OPERATE,
        "Forget a prompt or a namespace; or everything, with the role administer.",
        api.ClearAnswer,
        _API.clear,
        body=api.ClearOrder,
    ),
    Route(
        "GET",
        "/v1/settings",
        ControlRole.READ,
        "The settings that may change now.",
        api.SettingsAnswer,
        _API.settings,
    ),
    Route(
        "PATCH",
        "/v1/settings",
        ControlRole.ADMINISTER,
        "Change settings of the running node, all or none.",
        api.SettingsAnswer,
        _API.change_settings,
        body=dict[str, Any],
    ),
    Route(
        "POST",
        "/v1/flush",
        ControlRole.OPERATE,
        "Wait until the tiers have what was stored so far.",
        api.FlushAnswer,
        _API.flush,
        body=api.FlushOrder,
    ),
    Route(
        "POST",
        "/v1/move",
        ControlRole.OPERATE,
        "Move or copy a prompt's chunks from memory to a tier or a peer, in the background.",
        JobRow,
        _API.move,
        body=api.MoveOrder,
        status=201,
    ),
    Route("GET", "/v1/jobs", ControlRole.READ, "The jobs.", api.JobsAnswer, _API.jobs),
    Route(
        "POST",
        "/v1/jobs",
        ControlRole.OPERATE,
        "Re-encode the chunks of a tier in the background.",
        JobRow,
        _API.reencode,
        body=api.ReencodeOrder,
        status=201,
    ),
    Route("GET", "/v1/jobs/{number}", ControlRole.READ, "A job's progress.", JobRow, _API.job),
    Route(
        "DELETE",
        "/v1/jobs/{number}",
        ControlRole.OPERATE,
        "Cancel a job. Finished chunks stay as they are.",
        JobRow,
        _API.cancel,
    ),
    Route("POST", "/v1/stop", ControlRole.ADMINISTER, "End the node.", api.StopAnswer, _API.stop),
    *LMCACHE_ROUTES,
)
