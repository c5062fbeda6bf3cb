"""Numbers into 8 bits and back on a GPU: what numba_quantise.py does, with the same codes and values, bit by bit.

    int8_encode(elements, "bfloat16", head_dim=128, run=128, codes=codes, largest=largest)
    fp8_encode(elements, "bfloat16", column_largest(elements, "bfloat16", planes=2, width=1024), codes)

For who has the KV on a device: an engine's worker, or a tier of GPU memory, that encodes before bytes cross the bus, or decodes after. The
node never touches a device and uses the numba kernels. Arguments are contiguous torch tensors of one device: the bits of numbers as uint16
or uint32, codes int8 (int8) or uint8 (fp8), scales float32. The current stream does the work; only `all_finite` waits for it.

Arithmetic is in float32, one rounding an operation: divisions are correctly rounded, nothing is fused, and e4m3 is made by integer
arithmetic, as processors differ in what their own instructions do beyond 448. Elements are finite, as there; a NaN's payload may differ.

With TRITON_INTERPRET=1 when this module is imported, the same kernels run on host memory, slowly, for tests.
"""

import torch
import triton
import triton.language as tl

from kvhold.kernels.numba_floats import KINDS
from kvhold.kernels.triton_floats import EXACT, load_floats, magnitudes_of, nearest, store_floats
from kvhold.kernels.triton_launch import Tensor, check, on_device

TILE = 1024  # elements of one program
COLUMNS = 128  # of them side by side, where columns have scales


def int8_encode(elements: Tensor, dtype: str, head_dim: int, run: int, codes: Tensor, largest: Tensor) -> None:
    """elements [rows * head_dim] to codes [rows * head_dim]; largest [rows * runs of a row], the last run of a row may be shorter."""
    _int8(_int8_encode, elements, dtype, head_dim, run, codes, largest)


def int8_decode(codes: Tensor, largest: Tensor, dtype: str, head_dim: int, run: int, elements: Tensor) -> None:
    """The inverse, as near as 8 bits allow."""
    _int8(_int8_decode, elements, dtype, head_dim, run, codes, largest)


def _int8(
    kernel: triton.runtime.KernelInterface, elements: Tensor, dtype: str, head_dim: int, run: int, codes: Tensor, largest: Tensor
) -> None:
    check(INTERPRETED, elements, codes, largest)
    rows = elements.numel() // head_dim
    runs = -(-head_dim // run)
    assert run >= 1 and elements.numel() == rows * head_dim == codes.numel() and largest.numel() == rows * runs
    assert codes.dtype == torch.int8 and largest.dtype == torch.float32
    if not elements.numel():
        return
    columns = triton.next_power_of_2(min(run, head_dim))
    together = max(1, TILE // columns)
    with on_device(elements):
        kernel[(triton.cdiv(rows * runs, together),)](
            elements,
            codes,
            largest,
            rows * runs,
            head_dim,
            run,
            runs,
            kind=KINDS[dtype],
            together=together,
            columns=columns,
            **EXACT,
        )


def column_largest(elements: Tensor, dtype: str, planes: int, width: int) -> Tensor:
    """float32 [planes, width] the largest magnitude of each column of `elements` as [planes, tokens, width]; above all others where
    something is not finite."""
    check(INTERPRETED, elements)
    assert elements.numel() % (planes * width) == 0
    bits = torch.zeros((planes, width), dtype=torch.int32, device=elements.device)
    tokens = elements.numel() // (planes * width)
    if tokens:
        with on_device(elements):
            _column_largest[_column_grid(planes, tokens, width)](
                elements, bits, tokens, width, kind=KINDS[dtype], together=TILE // COLUMNS, columns=COLUMNS, **EXACT
            )
    return bits.view(torch.float32)


def all_finite(elements: Tensor, dtype: str) -> bool:
    """Whether there is neither an infinity nor a NaN."""
    mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}[dtype]
    bits = elements.view(torch.int32 if dtype == "float32" else torch.int16)
    return not bool((bits & mask == mask).any())


def fp8_encode(elements: Tensor, dtype: str, largest: Tensor, codes: Tensor) -> None:
    """elements [planes, tokens, width] to as many codes; largest [planes, width], of which the column's largest is one or below."""
    _fp8(_fp8_encode, elements, dtype, largest, codes)


def fp8_decode(codes: Tensor, largest: Tensor, dtype: str, elements: Tensor) -> None:
    """The inverse, as near as 8 bits allow."""
    _fp8(_fp8_decode, elements, dtype, largest, codes)


def _fp8(kernel: triton.runtime.KernelInterface, elements: Tensor, dtype: str, largest: Tensor, codes: Tensor) -> None:
    check(INTERPRETED, elements, codes, largest)
    assert codes.numel() == elements.numel() and elements.numel() % largest.numel() == 0
    assert codes.dtype == torch.uint8 and largest.dtype == torch.float32 and largest.ndim == 2
    planes, width = largest.shape
    tokens = elements.numel() // largest.numel()
    if tokens:
        with on_device(elements):
            kernel[_column_grid(planes, tokens, width)](
                elements, codes, largest, tokens, width, kind=KINDS[dtype], together=TILE // COLUMNS, columns=COLUMNS, **EXACT
            )


def _column_grid(planes: int, tokens: int, width: int) -> tuple[int, int, int]:
    return triton.cdiv(tokens, TILE // COLUMNS), triton.cdiv(width, COLUMNS), planes


def float_to_e4m3(values: Tensor) -> Tensor:
    """Each of `values` to float8_e4m3fn as torch does it: to nearest even, what is larger than 448 to that, NaN to NaN."""
    return _convert(_convert_to_e4m3, values, torch.uint8)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """What each of `codes` stands for."""
    return _convert(_convert_from_e4m3, codes, torch.float32)


def _convert(kernel: triton.runtime.KernelInterface, source: Tensor, dtype: torch.dtype) -> Tensor:
    check(INTERPRETED, source)
    target = torch.empty(source.shape, dtype=dtype, device=source.device)
    if source.numel():
        with on_device(source):
            kernel[(triton.cdiv(source.numel(), TILE),)](source, target, source.numel(), tile=TILE, **EXACT)
    return target


_SMALL = tl.constexpr(2.0**-60)  # below this the inverse of a scale may overflow
_UP = tl.constexpr(2.0**64)


@triton.jit
def _ups_and_scales(peaks, most):  # type: ignore[no-untyped-def]
    """What numbers are multiplied by, first and then, so that the peak becomes `most`."""
    ups = tl.where(peaks < _SMALL, _UP, 1.0)
    raised = tl.where(peaks > 0, peaks * ups, 1.0)
    return ups, tl.where(peaks > 0, tl.div_rn(tl.full(raised.shape, most, tl.float32), raised), 0.0)


@triton.jit
def _to_e4m3(values):  # type: ignore[no-untyped-def]
    """The codes, as uint32, of values that are not NaN; what is larger becomes 448."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFF_FFFF
    # From 2**-6 on: 20 bits of mantissa fall away, and the exponent's bias goes from 127 to 7.
    normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) - (120 << 23)) >> 20
    # Below: an addition to 2**14, where float32 has steps of 2**-9, rounds for us.
    below = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    return tl.where(magnitude < 121 << 23, below, tl.minimum(normal, 0x7E)) | (bits & 0x8000_0000) >> 24


@triton.jit
def _from_e4m3(bits):  # type: ignore[no-untyped-def]
    """The values of codes, given as uint32; 480 where that is NaN."""
    low = bits & 0x7F
    values = ((low << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    # Below 8 the exponent is 0 and has no hidden one; taken as if it had, it is 2**-7 * (1 + m/8) instead of 2**-6 * m/8.
    values = tl.where(low >= 8, values, (values - 0.0078125) * 2.0)
    return (values.to(tl.uint32, bitcast=True) | (bits & 0x80) << 24).to(tl.float32, bitcast=True)


@triton.jit
def _places(count, head_dim, run, runs, together: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """[together] numbers of runs, [together, columns] where their elements are, and which of those there are."""
    index = tl.program_id(0) * together + tl.arange(0, together)
    column = tl.arange(0, columns)
    begin = index % runs * run
    mask = (index < count)[:, None] & (column[None, :] < tl.minimum(run, head_dim - begin)[:, None])
    return index, (index // runs * head_dim + begin)[:, None] + column[None, :], mask


@triton.jit
def _int8_encode(  # type: ignore[no-untyped-def]
    elements, codes, largest, count, head_dim, run, runs, kind: tl.constexpr, together: tl.constexpr, columns: tl.constexpr
):
    """Grid [runs / together]."""
    index, i, mask = _places(count, head_dim, run, runs, together, columns)
    values = load_floats(elements + i, mask, kind)
    peaks = tl.reduce(magnitudes_of(values), 1, tl.standard._elementwise_max).to(tl.float32, bitcast=True)
    tl.store(largest + index, peaks, mask=index < count)
    ups, scales = _ups_and_scales(peaks, 127.0)
    tl.store(codes + i, nearest(values * ups[:, None] * scales[:, None]).to(tl.int8), mask=mask)


@triton.jit
def _int8_decode(  # type: ignore[no-untyped-def]
    elements, codes, largest, count, head_dim, run, runs, kind: tl.constexpr, together: tl.constexpr, columns: tl.constexpr
):
    """Grid [runs / together]. 127 times float32(1 / 127) is 1 exactly."""
    index, i, mask = _places(count, head_dim, run, runs, together, columns)
    peaks = tl.load(largest + index, mask=index < count, other=0)
    values = tl.load(codes + i, mask=mask, other=0).to(tl.float32) * (1 / 127)
    store_floats(elements + i, values * peaks[:, None], mask, kind)


@triton.jit
def _in_columns(tokens, width, together: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """[columns] where their scales are, and which there are; [together, columns] where elements are, and which there are."""
    token = tl.program_id(0) * together + tl.arange(0, together)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    plane = tl.program_id(2)
    i = (plane * tokens + token)[:, None] * width + column[None, :]
    return plane * width + column, column < width, i, (token < tokens)[:, None] & (column < width)[None, :]


@triton.jit
def _column_largest(elements, largest, tokens, width, kind: tl.constexpr, together: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [tokens / together, width / columns, planes]."""
    column, is_column, i, mask = _in_columns(tokens, width, together, columns)
    peaks = tl.reduce(magnitudes_of(load_floats(elements + i, mask, kind)), 0, tl.standard._elementwise_max)
    tl.atomic_max(largest + column, peaks, mask=is_column)


@triton.jit
def _fp8_encode(elements, codes, largest, tokens, width, kind: tl.constexpr, together: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [tokens / together, width / columns, planes]."""
    column, is_column, i, mask = _in_columns(tokens, width, together, columns)
    ups, scales = _ups_and_scales(tl.load(largest + column, mask=is_column, other=0), 448.0)
    values = load_floats(elements + i, mask, kind) * ups[None, :] * scales[None, :]
    tl.store(codes + i, _to_e4m3(values).to(tl.uint8), mask=mask)


@triton.jit
def _fp8_decode(elements, codes, largest, tokens, width, kind: tl.constexpr, together: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [tokens / together, width / columns, planes]. 448 times float32(1 / 448) is 1 exactly."""
    column, is_column, i, mask = _in_columns(tokens, width, together, columns)
    peaks = tl.load(largest + column, mask=is_column, other=0)
    values = _from_e4m3(tl.load(codes + i, mask=mask, other=0).to(tl.uint32)) * (1 / 448)
    store_floats(elements + i, values * peaks[None, :], mask, kind)


@triton.jit
def _convert_to_e4m3(values, codes, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    found = tl.load(values + i, mask=i < count, other=0)
    is_nan = (found.to(tl.uint32, bitcast=True) & 0x7FFF_FFFF) > 0x7F80_0000
    tl.store(codes + i, (_to_e4m3(found) | tl.where(is_nan, 0x7F, 0)).to(tl.uint8), mask=i < count)


@triton.jit
def _convert_from_e4m3(codes, values, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    bits = tl.load(codes + i, mask=i < count, other=0).to(tl.uint32)
    tl.store(values + i, tl.where((bits & 0x7F) == 0x7F, float("nan"), _from_e4m3(bits)), mask=i < count)


INTERPRETED = not isinstance(_fp8_decode, triton.runtime.JITFunction)
