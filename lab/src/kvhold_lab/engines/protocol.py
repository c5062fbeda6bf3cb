"""Engines in child processes: one JSON object a line, one reply to each operation."""

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import msgspec

from kvhold_lab.engines.process import EngineFailed, LoggedProcess

_log = logging.getLogger(__name__)

_SEARCHED_BYTES = 1 << 20  # vLLM prints many stacks after a worker's
_REFUSAL = "LayoutError: "


class ChildOperation(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True
): ...


class ChildReply(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="reply", forbid_unknown_fields=True
): ...


class ResetPrefixCache(ChildOperation, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """The engine's own KV; the connector's stays. -> PrefixCacheReset"""


class StopEngine(ChildOperation, frozen=True, kw_only=True, tag="stop"):
    """Shut down in order. -> Stopped"""


class PrefixCacheReset(ChildReply, frozen=True, kw_only=True, tag="reset"):
    """False: running requests prevented it"""

    done: bool


class Stopped(ChildReply, frozen=True, kw_only=True, tag="stopped"): ...


class Refusal(ChildReply, frozen=True, kw_only=True, tag="refused"):
    """The traceback is in the child's log.

    by_kvhold: the connector does not support this set-up
    """

    kind: str
    reason: str
    by_kvhold: bool = False


class EngineRefused(EngineFailed):
    def __init__(self, refusal: Refusal, log: str, log_tail: str) -> None:
        reason = f"{refusal.kind}: {refusal.reason}"
        told_in_log = [
            line[line.index(_REFUSAL) :] for line in log.splitlines() if _REFUSAL in line
        ]
        if not refusal.by_kvhold and told_in_log:
            reason = told_in_log[0]
        super().__init__(reason)
        self.by_kvhold = refusal.by_kvhold or bool(told_in_log)
        self.log_tail = log_tail


Reply = TypeVar("Reply", bound=ChildReply)


def ask(
    process: LoggedProcess, operation: ChildOperation, kind: type[Reply], *, timeout_s: float
) -> Reply:
    """Raises EngineRefused; EngineFailed: a dead or silent child, or another answer."""
    doing = str(operation.__struct_config__.tag)
    line = process.ask(msgspec.json.encode(operation), doing, timeout_s)
    expected: Any = kind | Refusal
    try:
        reply: Reply | Refusal = msgspec.json.decode(line, type=expected)
    except msgspec.DecodeError as error:
        raise process.failure(doing, f"sent a reply of another kind: {error}") from error
    if isinstance(reply, Refusal):
        raise EngineRefused(reply, process.log_tail(_SEARCHED_BYTES), process.log_tail())
    return reply


def serve(
    operations: Any,
    do: Callable[[Any], ChildReply],
    *,
    is_last: Callable[[ChildReply], bool] = lambda _: False,
) -> None:
    """Answer until the input ends, or after a last reply."""
    asked, replies = _take_pipes()
    faulthandler.register(signal.SIGUSR1)
    lines = msgspec.json.Decoder(operations)
    for line in asked:
        try:
            reply = do(lines.decode(line))
        except Exception as error:  # noqa: BLE001
            _log.exception("operation failed")
            reply = _refusal(error)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
        if is_last(reply):
            return


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """stdin is then empty, stdout is the log."""
    operations, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return operations, replies


def _refusal(error: BaseException) -> Refusal:
    seen = [error]
    while (cause := seen[-1].__cause__ or seen[-1].__context__) is not None and cause not in seen:
        seen.append(cause)
    ours = next((one for one in seen if type(one).__module__.startswith("kvhold.")), None)
    told = ours or error
    return Refusal(
        kind=type(told).__name__,
        reason=str(told),
        by_kvhold=ours is not None and type(ours).__name__ == "LayoutError",
    )
