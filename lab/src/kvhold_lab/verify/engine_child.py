import os
import sys

from kvhold_lab.engines.protocol import (
    ChildReply,
    PrefixCacheReset,
    ResetPrefixCache,
    StopEngine,
    Stopped,
    serve,
)
from kvhold_lab.verify.driver import VerifyDriver
from kvhold_lab.verify.messages import Ask, Operation, Serve, Start


class _Child:
    def __init__(self) -> None:
        self.drivers: list[VerifyDriver] = []

    def do(self, operation: Operation) -> ChildReply:
        if isinstance(operation, Start):
            assert not self.drivers, "stop the engine before starting another"
            self.drivers.append(VerifyDriver(operation))
            return self.drivers[0].started()
        match operation:
            case Ask():
                return self.drivers[0].ask(operation)
            case Serve():
                return self.drivers[0].serve(operation)
            case ResetPrefixCache():
                self.drivers[0].reset()
                return PrefixCacheReset(done=True)
            case StopEngine():
                self.drivers.pop().close()
                return Stopped()


def main() -> int:
    child = _Child()
    serve(Operation, child.do)
    for driver in child.drivers:
        driver.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads that block a normal exit
