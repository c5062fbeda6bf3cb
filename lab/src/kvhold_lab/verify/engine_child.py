"""The child's side of `kvhold_lab.verify.engine`: JSON lines in, JSON lines out. One thread."""

import faulthandler
import logging
import os
import signal
import sys

import msgspec

from kvhold_lab.engines.engine_child import take_pipes
from kvhold_lab.verify.driver import VerifyDriver
from kvhold_lab.verify.messages import (
    Ask,
    Operation,
    Reply,
    Serve,
    Start,
    VerifyDone,
    VerifyRefused,
    VerifyReset,
    VerifyStop,
)

_log = logging.getLogger(__name__)


def main() -> int:
    operations, replies = take_pipes()
    faulthandler.register(signal.SIGUSR1)
    lines = msgspec.json.Decoder(Operation)
    drivers: list[VerifyDriver] = []
    for line in operations:
        try:
            reply = _run(drivers, lines.decode(line))
        # the parent gets the reason, the log the traceback
        except Exception as error:  # noqa: BLE001
            _log.exception("operation failed")
            reply = _refused(error)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
    for driver in drivers:
        driver.close()
    return 0


def _run(drivers: list[VerifyDriver], operation: Operation) -> Reply:
    if isinstance(operation, Start):
        assert not drivers, "stop the engine before starting another"
        drivers.append(VerifyDriver(operation))
        return drivers[0].started()
    match operation:
        case Ask():
            return drivers[0].ask(operation)
        case Serve():
            return drivers[0].serve(operation)
        case VerifyReset():
            drivers[0].reset()
        case VerifyStop():
            drivers.pop().close()
    return VerifyDone()


def _refused(error: BaseException) -> VerifyRefused:
    """Prefer an error of kvhold among the causes."""
    seen = [error]
    while (cause := seen[-1].__cause__ or seen[-1].__context__) is not None and cause not in seen:
        seen.append(cause)
    ours = next((one for one in seen if type(one).__module__.startswith("kvhold.")), None)
    told = ours or error
    return VerifyRefused(
        kind=type(told).__name__,
        reason=str(told),
        by_kvhold=ours is not None and type(ours).__name__ == "LayoutError",
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads that would block a normal exit
