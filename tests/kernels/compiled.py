"""What a kernel compiled for a GPU does with memory, read from its assembly."""

import re
import subprocess
from pathlib import Path

GPUS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


def wide_accesses(text: str) -> tuple[int, int]:
    """Loads and stores of 16 bytes in global memory, in PTX or in an AMD GPU's assembly."""
    loads = re.findall(
        r"ld\.global\S*\.v2\.b64|ld\.global\S*\.v4\.b32|(?:global|buffer)_load_dwordx4", text
    )
    stores = re.findall(
        r"st\.global\S*\.v2\.b64|st\.global\S*\.v4\.b32|(?:global|buffer)_store_dwordx4", text
    )
    return len(loads), len(stores)


def memory_of_threads(cubin: bytes, folder: Path) -> set[str]:
    """What each kernel keeps in a thread's own memory because it has no register for it, by the
    tool of Triton's own wheel.
    """
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    told = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(re.findall(r"(?:STACK|LOCAL):\d+", told))
