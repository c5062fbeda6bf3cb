"""Child of `test_preloaded.py`: prints what it sees of its start, and ends with the code in
KVHOLD_TEST_CODE.
"""

import gc
import json
import os
import sys
from pathlib import Path

print("to the log", file=sys.stderr)
print(
    json.dumps(
        {
            "arguments": sys.argv[1:],
            "asked": sys.stdin.readline(),
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "cores": sorted(os.sched_getaffinity(0)),
            "group": os.getpgid(0),
            "pid": os.getpid(),
            "has_vllm": "vllm" in sys.modules,
            "open": [
                str(path.readlink())
                for path in Path("/proc/self/fd").iterdir()
                if path.is_symlink()
            ],
            "frozen": gc.get_freeze_count(),
        }
    )
)
sys.exit(int(os.environ["KVHOLD_TEST_CODE"]))
