"""vLLM engines in a child process, one after the other.

They share the child because importing vLLM takes longer than starting a small engine. After a
failure the next engine gets a new child. Used from one thread.
"""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from kvhold_lab.engines.process import EngineFailed, LoggedProcess
from kvhold_lab.engines.stepped import environment_for
from kvhold_lab.verify.messages import (
    Answered,
    Ask,
    Operation,
    Reply,
    Serve,
    Start,
    Started,
    VerifyDone,
    VerifyRefused,
    VerifyReset,
    VerifyServed,
    VerifyStop,
)

_R = TypeVar("_R", Started, Answered, VerifyServed, VerifyDone)
_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
_REFUSAL = "LayoutError: "
_SEARCHED_BYTES = 1 << 20  # of the log; vLLM prints many stacks after a worker's


class EngineRefused(EngineFailed):
    """The engine refused. by_kvhold: the connector does not support this set-up."""

    def __init__(self, refused: VerifyRefused, log: str, log_tail: str) -> None:
        reason = f"{refused.kind}: {refused.reason}"
        told_in_log = [
            line[line.index(_REFUSAL) :] for line in log.splitlines() if _REFUSAL in line
        ]
        if not refused.by_kvhold and told_in_log:
            reason = told_in_log[0]  # the engine itself only says that its worker died
        super().__init__(reason)
        self.by_kvhold = refused.by_kvhold or bool(told_in_log)
        self.log_tail = log_tail


class Engines:
    """The child. Every call raises EngineFailed when the child died, timed out or refused."""

    def __init__(
        self, *, timeout_s: float, threads: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._environment = {**environment_for(threads), **(environment or {})}
        self._process: LoggedProcess | None = None

    def start(self, options: Start) -> Started:
        if self._process is None:
            argv = [sys.executable, "-m", "kvhold_lab.verify.engine_child"]
            self._process = LoggedProcess(
                "the engine", argv, log_path=None, environment=self._environment, pipes=True
            )
        return self._ask(options, Started)

    def ask(self, questions: Ask) -> Answered:
        return self._ask(questions, Answered)

    def serve(self, arrivals: Serve) -> VerifyServed:
        return self._ask(arrivals, VerifyServed)

    def reset(self) -> None:
        self._ask(VerifyReset(), VerifyDone)

    def stop(self) -> None:
        self._ask(VerifyStop(), VerifyDone)

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, operation: Operation, kind: type[_R]) -> _R:
        assert self._process is not None, "start an engine first"
        try:
            return self._answer(self._process, operation, kind)
        except BaseException:
            self.close()
            raise

    def _answer(self, process: LoggedProcess, operation: Operation, kind: type[_R]) -> _R:
        doing = str(operation.__struct_config__.tag)
        line = process.ask(msgspec.json.encode(operation), doing, self._timeout_s)
        try:
            reply = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise process.failure(doing, f"answered with what is no reply: {error}") from error
        if isinstance(reply, VerifyRefused):
            raise EngineRefused(reply, process.log_tail(_SEARCHED_BYTES), process.log_tail())
        if not isinstance(reply, kind):
            raise process.failure(doing, f"answered {reply}")
        return reply
