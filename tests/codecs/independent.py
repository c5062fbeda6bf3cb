"""A reader and a key maker written from docs/format.md alone, sharing no line with kvhold: if the page is right, they agree with it."""

import struct
from hashlib import blake2b

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
    tag, content = {
        type(None): lambda v: (b"n", b""),
        bool: lambda v: (b"t" if v else b"f", b""),
        int: lambda v: (b"i", str(v).encode()),
        str: lambda v: (b"s", v.encode()),
        bytes: lambda v: (b"b", v),
        list: lambda v: (b"l", b"".join(encode(item) for item in v)),
    }[type(value)](value)
    return tag + struct.pack("<Q", len(content)) + content


def layout_fingerprint(layout: dict) -> bytes:
    names = ["layers", "planes", "heads", "head_dim", "dtype", "attention", "window", "packing", "block_tokens", "block_bytes", "rotary"]
    groups = [[group[name] for name in names] for group in layout["groups"]]
    content = encode(["kvhold-layout-1", layout["tokens_per_chunk"], layout["tail_tokens"], groups])
    return blake2b(content, digest_size=16).digest()


def namespace_digest(space: dict, fingerprint: bytes) -> bytes:
    fields = [space[name] for name in ["model", "revision", "dtype", "quantization", "shards", "lora", "cache_salt", "hashing"]]
    tags = [list(tag) for tag in sorted(map(tuple, space["tags"]))]
    return blake2b(encode(["kvhold-namespace-1", fields, tags, fingerprint]), digest_size=16).digest()


def chunk_hash(namespace: bytes, parent: bytes, tokens: list[int], extra: bytes = b"", inserts: list | None = None) -> bytes:
    """inserts: [start, length, digest] of each that this chunk touches."""
    person = b"kvhold-chunk-1\0\0"
    if inserts:
        person, extra = b"kvhold-insert-1\0", encode([extra, inserts])
    message = parent + struct.pack("<I", len(tokens)) + struct.pack(f"<{len(tokens)}i", *tokens) + extra
    return blake2b(message, digest_size=20, salt=namespace, person=person).digest()
