"""Send calls to their keys' servers.

After a server's failure or a cancelled call, the topology is read again. A failed call is retried
once.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from kvhold.core.errors import TierDenied, TierError, TierUnavailable
from kvhold.net.pool import Exchange
from kvhold.tiers.redis.endpoint import RedisEndpoint
from kvhold.tiers.redis.resp import Asking, ErrorReply, RedisCall, fault_of
from kvhold.tiers.redis.topology import Topology

_MAX_ROUNDS = 8

_log = logging.getLogger(__name__)


class Router:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._ailing: set[RedisEndpoint] = set()

    async def run(self, operation: str, calls: Sequence[RedisCall], *, bulk: bool) -> None:
        """Raises TierError if every call failed because of its server."""
        try:
            await self._run(operation, calls, bulk=bulk)
        except asyncio.CancelledError:
            self.topology.invalidate()
            raise
        faults = [outage(call, operation) for call in calls]
        if calls and all(faults):
            raise next(fault for fault in faults if fault)

    async def _run(self, operation: str, calls: Sequence[RedisCall], *, bulk: bool) -> None:
        failed: dict[RedisCall, RedisEndpoint] = {}
        asking: dict[RedisCall, RedisEndpoint] = {}
        pending = list(calls)
        for _ in range(_MAX_ROUNDS):
            groups = await self._placed(pending, failed, asking)
            if not groups:
                return
            await _together(
                [
                    endpoint.run(operation, list(group.values()), bulk=bulk)
                    for endpoint, group in groups.items()
                ]
            )
            pending, asking = [], {}
            for endpoint, group in groups.items():
                self._note(
                    endpoint,
                    all(
                        isinstance(call.fault or group[call].fault, TierUnavailable)
                        for call in group
                    ),
                )
                for call, exchange in group.items():
                    call.fault = exchange.fault
                    if self._goes_on(call, endpoint, failed, asking):
                        pending.append(call)
        for call in pending:
            call.fault = TierUnavailable(
                "redis", operation, f"sent from server to server, {_MAX_ROUNDS} times"
            )

    async def _placed(
        self,
        calls: Sequence[RedisCall],
        failed: dict[RedisCall, RedisEndpoint],
        asking: dict[RedisCall, RedisEndpoint],
    ) -> dict[RedisEndpoint, dict[RedisCall, Exchange]]:
        groups: dict[RedisEndpoint, dict[RedisCall, Exchange]] = {}
        for call in calls:
            if call in asking:
                groups.setdefault(asking[call], {})[call] = Asking(call)
                continue
            try:
                endpoint = await self.topology.endpoint_of(call.name)
            except TierError as error:
                call.fault = call.fault or error
                continue
            if failed.get(call) is not endpoint:
                call.forget()
                groups.setdefault(endpoint, {})[call] = call
        return groups

    def _goes_on(
        self,
        call: RedisCall,
        endpoint: RedisEndpoint,
        failed: dict[RedisCall, RedisEndpoint],
        asking: dict[RedisCall, RedisEndpoint],
    ) -> bool:
        code = call.reply.code if isinstance(call.reply, ErrorReply) and call.fault is None else ""
        if code in ("MOVED", "ASK") and isinstance(call.reply, ErrorReply):
            to = self.topology.moved(call.name, call.reply, endpoint)
            if to is not None and code == "ASK":
                asking[call] = to
            return to is not None
        if not isinstance(call.fault, TierUnavailable) and code not in (
            "READONLY",
            "CLUSTERDOWN",
            "MASTERDOWN",
        ):
            return False
        self.topology.invalidate()
        if call in failed:
            return False
        failed[call] = endpoint
        return True

    def _note(self, endpoint: RedisEndpoint, fails: bool) -> None:
        if fails and endpoint not in self._ailing:
            self._ailing.add(endpoint)
            _log.warning(
                "redis: %s does not answer; lookups of its chunks miss until it does",
                endpoint.address,
            )
        elif not fails and endpoint in self._ailing:
            self._ailing.discard(endpoint)
            _log.info("redis: %s answers again", endpoint.address)


def outage(call: RedisCall, operation: str) -> TierError | None:
    fault = fault_in(call, operation)
    return (
        fault
        if isinstance(fault, (TierUnavailable, TierDenied)) or call.fault is not None
        else None
    )


def fault_in(call: RedisCall, operation: str) -> TierError | None:
    if call.fault is not None:
        return call.fault
    return fault_of(call.reply, operation) if isinstance(call.reply, ErrorReply) else None


async def _together(runs: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(runs) == 1:
        await runs[0]
        return
    async with asyncio.TaskGroup() as group:
        for each in runs:
            group.create_task(each)
