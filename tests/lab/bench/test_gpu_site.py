"""`benchmarks/gpu_site.py`: which code of a library is kept."""

import struct
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_site.py"
PTX, CODE = 1, 2


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("gpu_site", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(kind: int, capability: int, code: bytes) -> bytes:
    """64 bytes of header, as nvcc writes them."""
    return struct.pack("<HHIQ12xI", kind, 0x101, 64, len(code), capability).ljust(64, b"h") + code


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_one_gpu_is_kept_and_nothing_else_moves(script: Any) -> None:
    def library(other: bytes, ptx: bytes) -> bytes:
        first = fatbin(entry(CODE, 80, other), entry(CODE, 90, b"kept" * 5), entry(PTX, 90, ptx))
        return b"\x7fELF..." + first + b"between" + fatbin(entry(CODE, 120, other)) + b"end"

    given = bytearray(library(b"gone" * 7, b"ptx!" * 3))
    assert script.empty_other_code(given, 90) == 28 + 12 + 28
    assert bytes(given) == library(bytes(28), bytes(12))


def test_a_number_that_only_looks_like_a_header_is_passed_over(script: Any) -> None:
    magic = (0xBA55ED50).to_bytes(4, "little")
    given = bytearray(magic + b"x" * 40 + fatbin(entry(CODE, 80, b"gone")))
    before = bytes(given)
    assert script.empty_other_code(given, 90) == 4
    assert bytes(given) == before.replace(b"gone", bytes(4))


def test_what_the_machine_has_is_not_packed(script: Any) -> None:
    names = {line.partition("==")[0] for line in script.needed("pytest", {"pluggy"})}
    assert {"pytest", "iniconfig"} <= names
    assert not {"pluggy", "torch"} & names
