"""Engines in a child process, for `kvhold verify`: start one, ask it, stop it, and start another in
the same process.

    with Engines(timeout_s=600, threads=2) as engines:
        started = engines.start(Start(engine={"model": ...}))
        answered = engines.ask(Ask(questions=[...], max_tokens=8))
        engines.stop()

A process of its own because an engine that hangs or dies must not take the command along. One after
each other in one process because importing vLLM takes longer than starting a small engine; but
after a failure the process is ended, since nobody knows what it left behind, and the next engine
gets a new one. Used from one thread.
"""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from kvhold.lab.engines.process import EngineFailed, LoggedProcess
from kvhold.lab.engines.stepped import environment_for
from kvhold.lab.verify.messages import (
    Answered,
    Ask,
    Done,
    Operation,
    Refused,
    Reply,
    Reset,
    Serve,
    Served,
    Start,
    Started,
    Stop,
)

_R = TypeVar("_R", Started, Answered, Served, Done)
_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
_REFUSAL = "LayoutError: "
_SEARCHED_BYTES = (
    1 << 20
)  # of the log: vLLM prints a stack for each of its processes after a worker's


class EngineRefused(EngineFailed):
    """The engine said why it did not do what it was asked.

    by_kvhold: the connector does not serve this set-up; log_tail: the end of what the engine has
        printed
    """

    def __init__(self, refused: Refused, log: str, log_tail: str) -> None:
        """log: all that may name the reason."""
        reason = f"{refused.kind}: {refused.reason}"
        told_in_log = [
            line[line.index(_REFUSAL) :] for line in log.splitlines() if _REFUSAL in line
        ]
        if not refused.by_kvhold and told_in_log:
            reason = told_in_log[
                0
            ]  # a worker's process, whose own reason reaches the engine as "it has died"
        super().__init__(reason)
        self.by_kvhold = refused.by_kvhold or bool(told_in_log)
        self.log_tail = log_tail


class Engines:
    """A child in which engines run after each other. Every call raises EngineFailed when the
    process died, was silent for too long or refused (EngineRefused).
    """

    def __init__(
        self, *, timeout_s: float, threads: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """timeout_s: of each call; threads: of an engine's arithmetic; environment: variables
        besides those of this process.
        """
        self._timeout_s = timeout_s
        self._environment = {**environment_for(threads), **(environment or {})}
        self._process: LoggedProcess | None = None

    def start(self, options: Start) -> Started:
        if self._process is None:
            argv = [sys.executable, "-m", "kvhold.lab.verify.engine_child"]
            self._process = LoggedProcess(
                "the engine", argv, log_path=None, environment=self._environment, pipes=True
            )
        return self._ask(options, Started)

    def ask(self, questions: Ask) -> Answered:
        return self._ask(questions, Answered)

    def serve(self, arrivals: Serve) -> Served:
        return self._ask(arrivals, Served)

    def reset(self) -> None:
        """Have the engine forget its own KV."""
        self._ask(Reset(), Done)

    def stop(self) -> None:
        """Shut the engine down in order."""
        self._ask(Stop(), Done)

    def close(self) -> None:
        """End the process, whatever it is doing."""
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
        if isinstance(reply, Refused):
            raise EngineRefused(reply, process.log_tail(_SEARCHED_BYTES), process.log_tail())
        if not isinstance(reply, kind):
            raise process.failure(doing, f"answered {reply}")
        return reply
