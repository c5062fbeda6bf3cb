"""The frames under vectors/ are what another implementation is checked with, and what we write today is the same bytes."""

import json
from typing import Any

import pytest

from kvhold.codecs import check_identity, encode_header, read_header, verify
from kvhold.core.errors import FrameError
from kvhold.core.layout import Group, Layout
from tests.codecs.independent import layout_fingerprint, read_frame
from tests.codecs.make_vectors import FOLDER, Vector, described, rejected, vectors

REJECTED = json.loads((FOLDER / "rejected.json").read_text())


@pytest.mark.parametrize("vector", list(vectors()), ids=lambda vector: vector.name)
def test_we_write_the_committed_bytes(vector: Vector) -> None:
    assert (FOLDER / f"{vector.name}.bin").read_bytes() == vector.frame
    assert json.loads((FOLDER / f"{vector.name}.json").read_text()) == json.loads(json.dumps(vector.description()))


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
            for offset, length, checksum in zip(header.offsets, header.lengths, header.checksums, strict=True)
        ],
    }
    assert found == {name: stated[name] for name in found}
    assert encode_header(header) == frame[: header.header_bytes]
    assert read_frame(frame).items() <= stated.items()
    if described_layout := stated.get("layout_is"):
        groups = tuple(Group(**group) for group in described_layout["groups"])
        layout = Layout(groups, described_layout["tokens_per_chunk"], described_layout["tail_tokens"])
        check_identity(header, key=header.key, layout=layout, num_tokens=header.num_tokens, first_token=header.first_token)
        assert layout_fingerprint(described_layout) == header.layout


@pytest.mark.parametrize("bad", REJECTED, ids=lambda bad: bad["says"])
def test_what_is_no_frame_is_refused_with_the_stated_reason(bad: dict[str, str]) -> None:
    frame = bytes.fromhex(bad["frame"])
    with pytest.raises(FrameError) as caught:  # noqa: PT012 - which of the two refuses it is not what matters
        header = read_header(frame, frame_bytes=len(frame))
        verify(header, frame[header.header_bytes :])
    assert caught.value.reason == bad["reason"]
