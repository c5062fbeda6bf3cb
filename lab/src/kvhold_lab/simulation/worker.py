"""Run seeds in a process.

    PYTHONHASHSEED=0 python -m kvhold_lab.simulation.worker FIRST COUNT [--trace] [--hosts N]

Without FIRST and COUNT, input lines have both. After each line's seeds, prints {"done": true}.
"""

import gc
import json
import sys
from typing import Any

from kvhold_lab.simulation.run import simulate

_COLLECT_EVERY = 25
_COLLECT_EVERY_HOSTS = 100


def main(first: int, count: int, *, trace: bool = False, hosts: int = 0) -> None:
    seeds = operations = digest = 0
    collect_every = max(1, min(_COLLECT_EVERY, _COLLECT_EVERY_HOSTS // max(1, hosts)))
    for seed in range(first, first + count):
        result = simulate(seed, trace=trace, hosts=hosts)
        seeds, operations = seeds + 1, operations + result.operations
        digest = result.digest
        if trace:
            print("\n".join(result.history))
        if result.findings:
            _say({"finding": {"seed": seed, "what": result.findings}})
        if seeds % collect_every == 0:
            gc.collect()
            _say({"seeds": seeds, "operations": operations, "digest": digest})
            seeds = operations = 0
    _say({"seeds": seeds, "operations": operations, "digest": digest})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.unraisablehook = lambda _: None
    gc.disable()
    gc.freeze()
    options = sys.argv[1:]
    num_hosts = int(options[options.index("--hosts") + 1]) if "--hosts" in options else 0
    if options and options[0].isdecimal():
        main(int(options[0]), int(options[1]), trace="--trace" in options, hosts=num_hosts)
    else:
        for asked in sys.stdin:
            begin, num_seeds = map(int, asked.split())
            main(begin, num_seeds, hosts=num_hosts)
            _say({"done": True})
