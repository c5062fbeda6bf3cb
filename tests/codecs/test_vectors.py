"""The frames under vectors/ are what another implementation is checked with, and what we write
today is the same bytes.
"""

import json
from typing import Any

import pytest

from kvhold.codecs import check_identity, encode_header, read_header, unframe_chunk, verify
from kvhold.codecs.frame import checksum
from kvhold.core.errors import FrameError
from kvhold.core.layout import Group, Layout
from tests.codecs.independent import decode_chunk, layout_fingerprint, read_frame
from tests.codecs.make_vectors import FOLDER, Vector, described, rejected, vectors

REJECTED = json.loads((FOLDER / "rejected.json").read_text())


@pytest.mark.parametrize("vector", list(vectors()), ids=lambda vector: vector.name)
def test_we_write_the_committed_bytes(vector: Vector) -> None:
    assert (FOLDER / f"{vector.name}.bin").read_bytes() == vector.frame
    assert json.loads((FOLDER / f"{vector.name}.json").read_text()) == json.loads(
        json.dumps(vector.description())
    )


def test_nothing_else_is_committed() -> None:
    expected = {f"{vector.name}.{kind}" for vector in vectors() for kind in ("bin", "json")}
    assert {path.name for path in FOLDER.iterdir()} == expected | {"rejected.json"}
    assert [described(bad) for bad in rejected()] == REJECTED


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.bin")), ids=lambda path: path.stem)
def test_we_read_every_field_as_the_json_states_it(path: Any) -> None:
    frame, stated = path.read_bytes(), json.loads(path.with_suffix(".json").read_text())
    header = read_header(frame, frame_bytes=len(frame))
    verify(header, frame[header.header_bytes :])
    found = {
        "key": header.key.hex(),
        "layout": header.layout.hex(),
        "num_tokens": header.num_tokens,
        "first_token": header.first_token,
        "expires_at": header.expires_at,
        "codec": header.codec,
        "packing": header.packing,
        "dtype": header.dtype,
        "shape": list(header.shape),
        "layer_bytes": header.layer_bytes,
        "header_bytes": header.header_bytes,
        "payload_bytes": header.payload_bytes,
        "layers": [
            {"offset": offset, "length": length, "checksum": f"{checksum:016x}"}
            for offset, length, checksum in zip(
                header.offsets, header.lengths, header.checksums, strict=True
            )
        ],
    }
    assert found == {name: stated[name] for name in found}
    assert encode_header(header) == frame[: header.header_bytes]
    assert read_frame(frame).items() <= stated.items()
    if described_layout := stated.get("layout_is"):
        groups = tuple(Group(**group) for group in described_layout["groups"])
        layout = Layout(
            groups, described_layout["tokens_per_chunk"], described_layout["tail_tokens"]
        )
        check_identity(
            header,
            key=header.key,
            layout=layout,
            num_tokens=header.num_tokens,
            first_token=header.first_token,
        )
        assert layout_fingerprint(described_layout) == header.layout


CODED = [
    path
    for path in sorted(FOLDER.glob("*.bin"))
    if "decoded" in json.loads(path.with_suffix(".json").read_text())
]


@pytest.mark.parametrize("path", CODED, ids=lambda path: path.stem)
def test_a_committed_frame_of_a_codec_decodes_to_the_committed_chunk_here_and_by_the_page_alone(
    path: Any,
) -> None:
    frame, stated = path.read_bytes(), json.loads(path.with_suffix(".json").read_text())
    layout_is = stated["layout_is"]
    layout = Layout(
        tuple(Group(**group) for group in layout_is["groups"]),
        layout_is["tokens_per_chunk"],
        layout_is["tail_tokens"],
    )
    into = bytearray(layout.chunk_bytes(0, stated["num_tokens"]))
    key = bytes.fromhex(stated["key"])
    unframe_chunk(
        memoryview(frame), memoryview(into), key=key, layout=layout, num_tokens=stated["num_tokens"]
    )
    assert f"{checksum(bytes(into)):016x}" == stated["decoded"]
    assert decode_chunk(frame, dtype=stated["dtype"], shape=stated["shape"]) == into


def test_every_codec_of_ours_has_a_committed_frame() -> None:
    committed = {
        json.loads(path.read_text())["codec"]
        for path in FOLDER.glob("*.json")
        if path.stem != "rejected"
    }
    assert committed >= {
        "raw",
        "lossless",
        "int8",
        "fp8",
        "cachegen",
        "kivi4",
        "kivi2",
        "k8v4",
        "turboquant4",
    }


@pytest.mark.parametrize("bad", REJECTED, ids=lambda bad: bad["says"])
def test_what_is_no_frame_is_refused_with_the_stated_reason(bad: dict[str, str]) -> None:
    frame = bytes.fromhex(bad["frame"])
    # which of the two refuses it is not what matters
    with pytest.raises(FrameError) as caught:  # noqa: PT012
        header = read_header(frame, frame_bytes=len(frame))
        verify(header, frame[header.header_bytes :])
    assert caught.value.reason == bad["reason"]
