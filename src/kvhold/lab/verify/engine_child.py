"""The child's side of `kvhold.lab.verify.engine`: lines of JSON in, vLLM called, lines of JSON out.
One thread, one operation at a time.

Started by `python -m kvhold.lab.verify.engine_child`. When the parent is gone the input ends, and
so does this process.
"""

import faulthandler
import logging
import os
import signal
import sys

import msgspec

from kvhold.lab.engines.engine_child import take_pipes
from kvhold.lab.verify.driver import Driver
from kvhold.lab.verify.messages import (
    Ask,
    Done,
    Operation,
    Refused,
    Reply,
    Reset,
    Serve,
    Start,
    Stop,
)

_log = logging.getLogger(__name__)


def main() -> int:
    operations, replies = take_pipes()
    faulthandler.register(
        signal.SIGUSR1
    )  # where each thread is, for a parent that has waited too long
    lines = msgspec.json.Decoder(Operation)
    drivers: list[Driver] = []
    for line in operations:
        try:
            reply = _run(drivers, lines.decode(line))
        # the edge of this process: the parent gets the reason, the log gets all of it
        except Exception as error:  # noqa: BLE001
            _log.exception("operation failed")
            reply = _refused(error)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
    for driver in drivers:
        driver.close()
    return 0


def _run(drivers: list[Driver], operation: Operation) -> Reply:
    """drivers: the one that runs, or none."""
    if isinstance(operation, Start):
        assert not drivers, "stop the engine before starting another"
        drivers.append(Driver(operation))
        return drivers[0].started()
    match operation:
        case Ask():
            return drivers[0].ask(operation)
        case Serve():
            return drivers[0].serve(operation)
        case Reset():
            drivers[0].reset()
        case Stop():
            drivers.pop().close()
    return Done()


def _refused(error: BaseException) -> Refused:
    """The innermost cause says most: engines wrap what happened in general errors."""
    seen = [error]
    while (cause := seen[-1].__cause__ or seen[-1].__context__) is not None and cause not in seen:
        seen.append(cause)
    ours = next((one for one in seen if type(one).__module__.startswith("kvhold.")), None)
    told = ours or error
    return Refused(
        kind=type(told).__name__,
        reason=str(told),
        by_kvhold=ours is not None and type(ours).__name__ == "LayoutError",
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads behind that wait for nothing
