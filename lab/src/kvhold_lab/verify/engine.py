import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from kvhold_lab.engines.process import LoggedProcess
from kvhold_lab.engines.protocol import (
    ChildOperation,
    PrefixCacheReset,
    Reply,
    ResetPrefixCache,
    StopEngine,
    Stopped,
    ask,
)
from kvhold_lab.engines.stepped import environment_for
from kvhold_lab.verify.messages import Answered, Ask, Serve, Start, Started, VerifyServed


class Engines:
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
                "the engine",
                argv,
                log_path=None,
                environment=self._environment,
                pipes=True,
                preloads=True,
            )
        return self._request(options, Started)

    def ask(self, questions: Ask) -> Answered:
        return self._request(questions, Answered)

    def serve(self, arrivals: Serve) -> VerifyServed:
        return self._request(arrivals, VerifyServed)

    def reset(self) -> None:
        self._request(ResetPrefixCache(), PrefixCacheReset)

    def stop(self) -> None:
        self._request(StopEngine(), Stopped)

    def close(self) -> None:
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

    def _request(self, operation: ChildOperation, kind: type[Reply]) -> Reply:
        assert self._process is not None, "start an engine first"
        try:
            return ask(self._process, operation, kind, timeout_s=self._timeout_s)
        except BaseException:
            self.close()
            raise
