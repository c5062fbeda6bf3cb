"""The codecs' Triton kernels compile for GPUs, which a machine without one can do too; the interpreter accepts more than the compiler."""

from importlib import import_module
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="no Triton in this environment")
pytest.importorskip("numba", reason="no numba in this environment")
compiler = pytest.importorskip("triton.compiler")
targets = pytest.importorskip("triton.backends.compiler")

GPUS = {"nvidia": ("cuda", 90, 32), "amd": ("hip", "gfx942", 64)}
SIZES = dict.fromkeys(
    ("count", "size", "width", "segment_size", "row_words", "num_kinds", "tokens", "head_dim", "run", "runs"),
    "i32",
)
SIZES |= dict.fromkeys(("row_bytes", "per_row", "groups_of_head", "first", "many", "in_vector"), "i32")
RANS = SIZES | {"words": "*u16", "scratch": "*u16", "counts": "*i64", "ends": "*i64", "kinds": "*u8", "symbols": "*u8", "out": "*u8"}
RANS |= {"tables": "*i32", "ranges": "*i32", "intact": "*i32", "planes": "*u8", "first": "*u8", "rest": "*u8", "bias": "*u8", "rows": "*u8"}
CODES = SIZES | {"largest": "*fp32"}
BINS = CODES | {"sums": "*fp64", "means": "*fp64", "steps": "*fp32", "offsets": "*i8", "deviations": "*i16", "symbols": "*u8"}
BINS |= {"exceptions": "*i8", "ends": "*i64"}
GROUPS = SIZES | {"codes": "*u8"}
TURNS = GROUPS | {"scales": "*fp32", "signs": "*fp32", "levels": "*fp32", "middles": "*fp32", "limit": "fp32"}
CODER: dict[str, Any] = {"lanes": 32, "has_kinds": False, "scale_bits": 12}
VECTORS = {"stages": 7, "together": 8}
TILES = {"together": 8, "columns": 128}
KERNELS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    ("rans", "_encode", RANS, CODER),
    ("rans", "_decode", RANS, CODER),
    ("rans", "_encode", RANS, CODER | {"has_kinds": True, "scale_bits": 10}),
    ("rans", "_decode", RANS, CODER | {"has_kinds": True, "scale_bits": 10}),
    ("rans", "_gather", RANS, {"tile": 1024}),
    ("rans", "_histogram", RANS, {"tile": 1024}),
    ("rans", "_split", RANS | {"elements": "*u16"}, {"size": 2, "tile": 1024}),
    ("rans", "_merge", RANS | {"out": "*u16"}, {"size": 2, "tile": 1024, "biased": True}),
    ("quantise", "_convert_to_e4m3", SIZES | {"values": "*fp32", "codes": "*u8"}, {"tile": 1024}),
    ("quantise", "_convert_from_e4m3", SIZES | {"values": "*fp32", "codes": "*u8"}, {"tile": 1024}),
]
for kind, bits in enumerate(("*u16", "*u16", "*u32")):
    of_kind = TILES | {"kind": kind}
    KERNELS += [
        ("quantise", "_int8_encode", CODES | {"elements": bits, "codes": "*i8"}, of_kind),
        ("quantise", "_int8_decode", CODES | {"elements": bits, "codes": "*i8"}, of_kind),
        ("quantise", "_fp8_encode", CODES | {"elements": bits, "codes": "*u8"}, of_kind),
        ("quantise", "_fp8_decode", CODES | {"elements": bits, "codes": "*u8"}, of_kind),
        ("quantise", "_column_largest", CODES | {"elements": bits, "largest": "*i32"}, of_kind),
        ("bins", "_sums", BINS | {"elements": bits}, {"kind": kind, "columns": 128, "centred": False}),
        ("bins", "_sums", BINS | {"elements": bits}, {"kind": kind, "columns": 128, "centred": True}),
        ("bins", "_quantise", BINS | {"elements": bits}, of_kind | {"most": 127}),
        ("bins", "_dequantise", BINS | {"elements": bits}, {"kind": kind, "columns": 1024, "escape": 128}),
    ]
    pair, tile = GROUPS | {"elements": bits, "ends": bits}, {"kind": kind, "columns": 64}
    for of_heads in ({"in_columns": True, "head_dim": 1, "groups_of_head": 1}, {"in_columns": False}):
        KERNELS.append(("groups", "_ends", pair, tile | of_heads))
        KERNELS += [("groups", name, pair, tile | of_heads | {"bits": each}) for name in ("_codes", "_values") for each in (2, 4)]
    KERNELS += [("turns", name, TURNS | {"elements": bits}, VECTORS | {"kind": kind}) for name in ("_encode", "_decode")]
# Launches make constants of arguments that are 1.
KERNELS += [
    ("rans", "_encode", RANS, CODER | {"num_kinds": 1}),
    ("rans", "_decode", RANS, CODER | {"num_kinds": 1}),
    ("rans", "_decode", RANS, CODER | {"has_kinds": True, "scale_bits": 10, "width": 1, "num_kinds": 1}),
    ("rans", "_encode", RANS, CODER | {"has_kinds": True, "scale_bits": 10, "width": 1, "size": 1, "segment_size": 1}),
    ("rans", "_histogram", RANS, {"tile": 1024, "count": 1}),
    ("rans", "_merge", RANS | {"out": "*u64"}, {"size": 8, "tile": 1024, "biased": False, "width": 1, "count": 1}),
    ("quantise", "_int8_encode", CODES | {"elements": "*u16", "codes": "*i8"}, TILES | {"kind": 0, "runs": 1}),
    (
        "quantise",
        "_int8_decode",
        CODES | {"elements": "*u16", "codes": "*i8"},
        {"kind": 0, "together": 1024, "columns": 1, "head_dim": 1, "run": 1, "runs": 1},
    ),
    ("quantise", "_fp8_encode", CODES | {"elements": "*u16", "codes": "*u8"}, TILES | {"kind": 0, "tokens": 1, "width": 1}),
    ("bins", "_sums", BINS | {"elements": "*u16"}, {"kind": 0, "columns": 128, "centred": True, "tokens": 1, "width": 1}),
    ("bins", "_quantise", BINS | {"elements": "*u16"}, TILES | {"kind": 0, "most": 127, "tokens": 1, "width": 1}),
    ("bins", "_dequantise", BINS | {"elements": "*u16"}, {"kind": 0, "columns": 1, "escape": 128, "width": 1}),
]
ROWS = {"kind": 0, "columns": 1, "in_columns": False, "width": 1, "per_row": 1, "head_dim": 1, "groups_of_head": 1}
BYTES = ROWS | {"tokens": 1, "row_bytes": 1, "bits": 4}
KERNELS += [
    ("groups", name, GROUPS | {"elements": "*u16", "ends": "*u16"}, ones)
    for name, ones in (("_ends", ROWS), ("_codes", BYTES), ("_values", BYTES))
]
ONE_RUN = {"kind": 0, "many": 1, "runs": 1, "count": 1}
ONE_PLACE = {"stages": 0, "together": 1024, "in_vector": 1, "head_dim": 1, "row_bytes": 1}
KERNELS += [
    ("turns", name, TURNS | {"elements": "*u16"}, ONE_RUN | more)
    for name in ("_encode", "_decode")
    for more in (VECTORS, ONE_PLACE, {"stages": 1, "together": 512, "row_bytes": 1})
]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("module", "name", "types", "constants"), KERNELS, ids=lambda value: value if isinstance(value, str) else "")
def test_compiles_and_fuses_nothing(
    gpu: str, module: str, name: str, types: dict[str, str], constants: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = getattr(import_module(f"kvhold.kernels.triton_{module}"), name)
    signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
    values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = compiler.ASTSource(kernel, signature, values)
    options = {"enable_fp_fusion": False, "num_warps": 1 if "lanes" in constants else 4}
    built = triton.compile(source, target=targets.GPUTarget(*GPUS[gpu]), options=options)
    if gpu == "nvidia":
        assert not [each for each in ("fma.rn.f", ".ftz", "div.full", ".approx") if each in built.asm["ptx"]]


def test_host_memory_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rans, quantise = (import_module(f"kvhold.kernels.triton_{name}") for name in ("rans", "quantise"))
    elements = torch.zeros(4, dtype=torch.uint16)
    for call in (lambda: rans.split(elements), lambda: quantise.column_largest(elements, "bfloat16", 1, 4)):
        with pytest.raises(ValueError, match="TRITON_INTERPRET"):
            call()
