"""A reader and a key maker written from docs/format.md alone, sharing no line with kvhold: if the
page is right, they agree with it.
"""

import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import xxhash


def read_frame(frame: bytes) -> dict[str, object]:
    """Every field of a valid frame. A frame that is not valid ends in an AssertionError."""
    assert frame[0:8] == b"\x89kvhold\n"
    version, flags, header_bytes, payload_bytes = struct.unpack_from("<HHIQ", frame, 8)
    assert version == 1 and flags == 0
    assert len(frame) == header_bytes + payload_bytes and header_bytes % 8 == 0
    (header_checksum,) = struct.unpack_from("<Q", frame, header_bytes - 8)
    assert header_checksum == xxhash.xxh3_64_intdigest(frame[: header_bytes - 8])

    first_token, num_tokens, num_layers, layer_bytes = struct.unpack_from("<qIIQ", frame, 80)
    expires_at, rank = struct.unpack_from("<QQ", frame, 168)
    shape = list(struct.unpack_from(f"<{rank}Q", frame, 184))
    layers = []
    for layer in range(num_layers):
        offset, length, checksum = struct.unpack_from("<QQQ", frame, 184 + 8 * rank + 24 * layer)
        encoded = frame[header_bytes + offset : header_bytes + offset + length]
        assert checksum == xxhash.xxh3_64_intdigest(encoded)
        layers.append({"offset": offset, "length": length, "checksum": f"{checksum:016x}"})
    return {
        "layout": frame[24:40].hex(),
        "key": frame[40:80].hex(),
        "first_token": first_token,
        "num_tokens": num_tokens,
        "expires_at": expires_at,
        "layer_bytes": layer_bytes,
        "codec": frame[104:120].rstrip(b"\0").decode(),
        "dtype": frame[120:136].rstrip(b"\0").decode(),
        "packing": frame[136:168].rstrip(b"\0").decode(),
        "shape": shape,
        "layers": layers,
        "header_bytes": header_bytes,
        "payload_bytes": payload_bytes,
        "header_checksum": f"{header_checksum:016x}",
    }


def encode(value: object) -> bytes:
    """`enc` of docs/format.md."""
    encoders: dict[type, Callable[[Any], tuple[bytes, bytes]]] = {
        type(None): lambda v: (b"n", b""),
        bool: lambda v: (b"t" if v else b"f", b""),
        int: lambda v: (b"i", str(v).encode()),
        str: lambda v: (b"s", v.encode()),
        bytes: lambda v: (b"b", v),
        list: lambda v: (b"l", b"".join(encode(item) for item in v)),
    }
    tag, content = encoders[type(value)](value)
    return tag + struct.pack("<Q", len(content)) + content


def layout_fingerprint(layout: dict[str, Any]) -> bytes:
    names = [
        "layers",
        "planes",
        "heads",
        "head_dim",
        "dtype",
        "attention",
        "window",
        "packing",
        "block_tokens",
        "block_bytes",
        "rotary",
    ]
    groups = [[group[name] for name in names] for group in layout["groups"]]
    content = encode(["kvhold-layout-1", layout["tokens_per_chunk"], layout["tail_tokens"], groups])
    return blake2b(content, digest_size=16).digest()


def namespace_digest(space: dict[str, Any], fingerprint: bytes) -> bytes:
    fields = [
        space[name]
        for name in [
            "model",
            "revision",
            "dtype",
            "quantization",
            "shards",
            "lora",
            "cache_salt",
            "hashing",
        ]
    ]
    tags = [list(tag) for tag in sorted(map(tuple, space["tags"]))]
    facts = sorted(map(list, space.get("facts", [])))
    facts_digest = (
        blake2b(encode(["kvhold-facts-1", facts]), digest_size=32).digest() if facts else b""
    )
    digest = blake2b(
        encode(["kvhold-namespace-3", fields, tags, fingerprint, facts_digest]), digest_size=16
    ).digest()
    allows_loss = any(name in ("kvhold.max_error", "kvhold.max_bits") for name, _ in tags)
    digest = digest[:15] + bytes([digest[15] // 4 * 4 + allows_loss])
    if not space.get("is_of_spans"):
        return digest
    digest = blake2b(digest, digest_size=16, person=b"kvhold-spans-1\0\0").digest()
    return digest[:15] + bytes([digest[15] | 3])


def chunk_hash(
    namespace: bytes,
    parent: bytes,
    tokens: list[int],
    extra: bytes = b"",
    inserts: list[list[Any]] | None = None,
) -> bytes:
    """inserts: [start, length, digest] of each that this chunk touches."""
    person = b"kvhold-chunk-1\0\0"
    if inserts:
        person, extra = b"kvhold-insert-1\0", encode([extra, inserts])
    message = (
        parent + struct.pack("<I", len(tokens)) + struct.pack(f"<{len(tokens)}i", *tokens) + extra
    )
    return blake2b(message, digest_size=20, salt=namespace, person=person).digest()


def decode_chunk(frame: bytes, *, dtype: str, shape: list[int]) -> bytes:
    """All layers of a frame of one of our codecs, decoded an element at a time."""
    fields = read_frame(frame)
    decoders = {
        "raw": lambda encoded, *_: encoded,
        "lossless": decode_lossless,
        "int8": decode_int8,
        "fp8": decode_fp8,
    }
    others = {
        "cachegen": decode_cachegen,
        "kivi4": decode_kivi4,
        "kivi2": decode_kivi2,
        "k8v4": decode_k8v4,
        "turboquant4": decode_turboquant4,
    }
    decode = {**decoders, **others}[str(fields["codec"])]
    payload, layers = frame[int(str(fields["header_bytes"])) :], []
    for row in fields["layers"]:  # type: ignore[attr-defined]
        encoded = payload[row["offset"] : row["offset"] + row["length"]]
        layers.append(
            encoded[1:]
            if encoded[0] == 0 and fields["codec"] != "raw"
            else decode(encoded, dtype, shape)
        )
    return b"".join(layers)


ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


def decode_lossless(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    """`shape` is planes, tokens, heads, head_dim."""
    assert encoded[0] == 1
    size, count, width = ELEMENT_BYTES[dtype], shape[1] * shape[2] * shape[3], shape[2] * shape[3]
    at, plain = 1, bytearray()
    for _ in range(shape[0]):
        streams = []
        for _ in range(size):
            stream, at = _decode_stream(encoded, at, count, width)
            streams.append(stream)
        for element in zip(*streams, strict=True):
            turned = int.from_bytes(bytes(element), "big")
            plain += (turned >> 1 | (turned & 1) << (8 * size - 1)).to_bytes(size, "little")
    assert at == len(encoded)
    return bytes(plain)


def _decode_stream(data: bytes, at: int, count: int, width: int) -> tuple[bytes, int]:
    form, at = data[at], at + 1
    if form == 0:
        return data[at : at + count], at + count
    if form == 1:
        return data[at : at + 1] * count, at + 1
    bias = bytes(width)
    if form == 3:
        bias, at = data[at : at + width], at + width
    symbols, at = data[at] + 1, at + 1
    slots: list[tuple[int, int, int]] = []
    for _ in range(symbols):
        symbol, often = struct.unpack_from("<BH", data, at)
        slots += [(symbol, often, len(slots))] * often
        at += 3
    assert len(slots) == 4096
    segments = -(-count // 32768)
    lengths = struct.unpack_from(f"<{segments}I", data, at)
    at += 4 * segments
    out = bytearray()
    for length in lengths:
        words = list(struct.unpack_from(f"<{length}H", data, at))
        at += 2 * length
        states = [words[2 * lane] + (words[2 * lane + 1] << 16) for lane in range(32)]
        rest = iter(words[64:])
        for i in range(min(32768, count - len(out))):
            x = states[i % 32]
            symbol, often, begin = slots[x % 4096]
            x = often * (x // 4096) + x % 4096 - begin
            states[i % 32] = x if x >= 1 << 16 else (x << 16) + next(rest)
            out.append((symbol + bias[len(out) % width]) % 256)
        assert states == [1 << 16] * 32 and next(rest, None) is None
    return bytes(out), at


def decode_int8(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    assert encoded[0] == 1
    heads, head_dim = shape[0] * shape[1] * shape[2], shape[3]
    runs = -(-head_dim // 128)
    scales = np.frombuffer(encoded, "<f4", heads * runs, 1)
    codes = (
        np.frombuffer(encoded, np.int8, heads * head_dim, 1 + 4 * len(scales))
        .astype(np.float32)
        .reshape(heads, head_dim)
    )
    each = np.repeat(scales.reshape(heads, runs), 128, axis=1)[:, :head_dim]
    return _rounded(codes * np.float32(1 / 127) * each, dtype)


def decode_fp8(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    planes, tokens, heads, head_dim = shape
    kinds = planes * heads * (head_dim if encoded[0] == 1 else 1)
    scales = np.frombuffer(encoded, "<f4", kinds, 1).reshape(planes, 1, heads, -1)
    codes = (
        np.frombuffer(encoded, np.uint8, planes * tokens * heads * head_dim, 1 + 4 * kinds)
        .astype(np.int32)
        .reshape(shape)
    )
    assert len(encoded) == 1 + 4 * kinds + codes.size
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    values = np.where(codes & 128, -values, values).astype(np.float32)
    return _rounded(values * np.float32(1 / 448) * scales, dtype)


def decode_cachegen(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    assert encoded[0] == 1
    at, plain = 1, b""
    for _ in range(shape[0]):
        plane, at = _decode_binned(encoded, at, dtype, shape)
        plain += plane
    assert at == len(encoded)
    return plain


def _decode_binned(data: bytes, at: int, dtype: str, shape: list[int]) -> tuple[bytes, int]:
    _, tokens, heads, head_dim = shape
    (base,) = struct.unpack_from("<f", data, at)
    sharing, has_shifts, num_kinds = data[at + 4 : at + 7]
    at += 7
    groups_of_head, runs_of_head = -(-head_dim // 2**sharing), -(-head_dim // 128)
    group = [
        head * groups_of_head + i // 2**sharing for head in range(heads) for i in range(head_dim)
    ]
    run = [head * runs_of_head + i // 128 for head in range(heads) for i in range(head_dim)]
    channels = data[at : at + heads * groups_of_head]
    at += len(channels)
    offsets = []
    for channel in channels:
        offsets.append(struct.unpack_from("<b", data, at)[0] if channel & 128 else 0)
        at += channel >> 7
    halves = [0] * (tokens * heads * runs_of_head)
    if has_shifts:
        count = len(halves)
        halves = [
            half for byte in data[at : at + (count + 1) // 2] for half in (byte & 15, byte >> 4)
        ]
        at += (count + 1) // 2
    slots, numbers = [], data[at : at + num_kinds]
    at += num_kinds
    for number in numbers:
        frequencies = list(struct.unpack_from(f"<{number}H", data, at)) or [1024]
        at += 2 * number
        often = [0] * 256
        for m, frequency in enumerate(frequencies):
            often[m] = often[-m] = frequency
        often[128] = 1024 - sum(often)
        slots.append(
            [
                (symbol, often[symbol], place)
                for symbol in range(256)
                for place in range(often[symbol])
            ]
        )
        assert len(slots[-1]) == 1024
    (count,) = struct.unpack_from("<I", data, at)
    exceptions = iter(struct.unpack_from(f"<{count}b", data, at + 4))
    at += 4 + count
    rows = max(1, 131072 // len(group))
    lengths = struct.unpack_from(f"<{-(-tokens // rows)}I", data, at)
    at += 4 * len(lengths)
    values = np.zeros((tokens, len(group)), np.float32)
    for segment, length in enumerate(lengths):
        words = list(struct.unpack_from(f"<{length}H", data, at))
        at += 2 * length
        states = [words[2 * lane] + (words[2 * lane + 1] << 16) for lane in range(32)]
        rest = iter(words[64:])
        for token in range(segment * rows, min(tokens, (segment + 1) * rows)):
            for i, its_group in enumerate(group):
                kind = channels[its_group] & 15
                if kind and has_shifts:
                    shift = halves[token * heads * runs_of_head + run[i]]
                    kind = min(max(kind + shift - (shift >> 3) * 16, 1), num_kinds - 1)
                x = states[i % 32]
                symbol, often, place = slots[kind][x % 1024]
                x = often * (x // 1024) + place
                states[i % 32] = x if x >= 1 << 16 else (x << 16) + next(rest)
                number = (
                    next(exceptions)
                    if symbol == 128
                    else (symbol + offsets[its_group] + 128) % 256 - 128
                )
                values[token, i] = np.float32(number) * np.float32(
                    base * 2.0 ** (channels[its_group] >> 4 & 7)
                )
        assert states == [1 << 16] * 32 and next(rest, None) is None
    assert next(exceptions, None) is None
    return _rounded(values.reshape(-1), dtype), at


def decode_kivi4(encoded: bytes, dtype: str, shape: list[int], bits: int = 4) -> bytes:
    assert encoded[0] == 1
    planes, tokens, heads, head_dim = shape
    width, full = heads * head_dim, tokens // 32
    row = -(-width * bits // 8)
    ends, at = _elements(encoded, 1, dtype, full * 2 * width)
    ends = ends.reshape(full, 2, width)
    codes = [
        _codes(encoded[at + token * row : at + (token + 1) * row], width, bits)
        for token in range(full * 32)
    ]
    at += full * 32 * row
    plain = b"".join(
        _between(ends[token // 32, 0], ends[token // 32, 1], code, bits, dtype)
        for token, code in enumerate(codes)
    )
    rest = (tokens - 32 * full) * width * ELEMENT_BYTES[dtype]
    plain += encoded[at : at + rest]
    if planes == 2:
        return plain + _decode_values(encoded[at + rest :], dtype, shape, bits)
    assert at + rest == len(encoded)
    return plain


def decode_kivi2(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    return decode_kivi4(encoded, dtype, shape, bits=2)


def decode_k8v4(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    planes, tokens, heads, head_dim = shape
    keys = 1 + tokens * heads * (4 * -(-head_dim // 128) + head_dim)
    assert planes == 2
    return decode_int8(encoded[:keys], dtype, [1, *shape[1:]]) + _decode_values(
        encoded[keys:], dtype, shape, bits=4
    )


def decode_turboquant4(encoded: bytes, dtype: str, shape: list[int]) -> bytes:
    assert encoded[0] == 1
    heads, head_dim = shape[0] * shape[1] * shape[2], shape[3]
    runs = [(begin, min(head_dim, begin + 128)) for begin in range(0, head_dim, 128)]
    scales, at = (
        np.frombuffer(encoded, "<f4", heads * len(runs), 1).reshape(heads, -1),
        1 + 4 * heads * len(runs),
    )
    above = [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326]
    levels = np.array(above + [-level for level in above], np.float32)
    signs = int.from_bytes(blake2b(b"kvhold-signs-1", digest_size=16).digest(), "little")
    size, plain = ELEMENT_BYTES[dtype], bytearray(heads * head_dim * ELEMENT_BYTES[dtype])
    for head in range(heads):
        for run, (begin, end) in enumerate(runs):
            places = next(2**k for k in range(8) if 2**k >= end - begin)
            count = (places + 1) // 2
            row = np.array(
                [levels[encoded[at + i % count] >> 4 * (i // count) & 15] for i in range(places)],
                np.float32,
            )
            at += count
            apart = places // 2
            while apart:
                pairs = row.reshape(-1, 2, apart)
                row = np.stack(
                    [pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1
                ).reshape(-1)
                apart //= 2
            turned = np.array([-1 if signs >> i & 1 else 1 for i in range(end - begin)], np.float32)
            values = row[: end - begin] * scales[head, run] * turned
            plain[(head * head_dim + begin) * size : (head * head_dim + end) * size] = _rounded(
                values, dtype
            )
    for run, (begin, end) in enumerate(runs):
        for head in np.flatnonzero(scales[:, run] == -1):
            place = (int(head) * head_dim + begin) * size
            plain[place : place + (end - begin) * size] = encoded[at : at + (end - begin) * size]
            at += (end - begin) * size
    assert at == len(encoded)
    return bytes(plain)


def _decode_values(data: bytes, dtype: str, shape: list[int], bits: int) -> bytes:
    _, tokens, heads, head_dim = shape
    of_head, width = -(-head_dim // 32), heads * head_dim
    group = [head * of_head + i // 32 for head in range(heads) for i in range(head_dim)]
    row = -(-width * bits // 8)
    ends, at = _elements(data, 0, dtype, tokens * 2 * heads * of_head)
    assert len(data) == at + tokens * row
    plain = b""
    for token, (least, largest) in enumerate(ends.reshape(tokens, 2, heads * of_head)):
        code = _codes(data[at + token * row : at + (token + 1) * row], width, bits)
        plain += _between(least[group], largest[group], code, bits, dtype)
    return plain


def _codes(row: bytes, width: int, bits: int) -> np.ndarray:
    return np.array(
        [row[i % len(row)] >> bits * (i // len(row)) & (1 << bits) - 1 for i in range(width)],
        np.float32,
    )


def _between(
    least: np.ndarray, largest: np.ndarray, code: np.ndarray, bits: int, dtype: str
) -> bytes:
    steps = np.float32(2**bits - 1)
    part = np.float32(1) / steps
    return _rounded(least * ((steps - code) * part) + largest * (code * part), dtype)


def _elements(data: bytes, at: int, dtype: str, count: int) -> tuple[np.ndarray, int]:
    """float32 [count] from `at` on, and where they end."""
    if dtype == "bfloat16":
        found = (np.frombuffer(data, "<u2", count, at).astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.frombuffer(data, {"float16": "<f2", "float32": "<f4"}[dtype], count, at).astype(
            np.float32
        )
    return found, at + count * ELEMENT_BYTES[dtype]


def _rounded(values: np.ndarray, dtype: str) -> bytes:
    """float32 to the dtype, to nearest even."""
    assert values.dtype == np.float32
    if dtype != "bfloat16":
        return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return (
        ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16))
        .astype("<u2")
        .tobytes()
    )
