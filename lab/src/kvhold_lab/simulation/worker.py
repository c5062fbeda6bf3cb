"""Run seeds in a process, and print lines of JSON.

Usage: PYTHONHASHSEED=0 python -m kvhold_lab.simulation.worker FIRST COUNT [--trace] [--hosts N]
"""

import gc
import json
import sys
from typing import Any

from kvhold_lab.simulation.run import simulate

_COLLECT_EVERY = 25


def main(first: int, count: int, *, trace: bool = False, hosts: int = 0) -> None:
    sys.unraisablehook = lambda _: None  # for killed processes
    gc.disable()  # garbage collection must not be part of a history
    gc.freeze()
    seeds = operations = 0
    for seed in range(first, first + count):
        result = simulate(seed, trace=trace, hosts=hosts)
        seeds, operations = seeds + 1, operations + result.operations
        if trace:
            print("\n".join(result.history))
        if result.findings:
            _say({"finding": {"seed": seed, "what": result.findings}})
        if seeds % _COLLECT_EVERY == 0:
            gc.collect()
            _say({"seeds": seeds, "operations": operations, "digest": result.digest})
            seeds = operations = 0
    _say({"seeds": seeds, "operations": operations, "digest": result.digest})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    options = sys.argv[3:]
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        trace="--trace" in options,
        hosts=int(options[options.index("--hosts") + 1]) if "--hosts" in options else 0,
    )
