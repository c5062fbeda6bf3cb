"""Sealed frames: only the same key, tenant and chunk open them, and only as they were."""

import base64
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="no cryptography in this environment")

from kvhold.codecs.sealing import KEY_BYTES, OVERHEAD_BYTES, Keyring
from kvhold.core.errors import ConfigError, FrameError

SECRET = bytes(range(KEY_BYTES))
CHUNK = b"k" * 40


def sealed_by(keyring: Keyring, frame: bytes, tenant: str = "") -> bytes:
    (sealed,) = keyring.seal(
        (memoryview(frame[:5]), memoryview(frame[5:])), key=CHUNK, tenant=tenant
    )
    return bytes(sealed)


@settings(max_examples=50)
@given(frame=st.binary(max_size=300), tenant=st.text("abcé", max_size=5))
def test_a_frame_comes_back_from_whoever_knows_the_key(frame: bytes, tenant: str) -> None:
    keyring = Keyring({"": [SECRET]})
    sealed = sealed_by(keyring, frame, tenant)
    assert len(sealed) == len(frame) + OVERHEAD_BYTES
    assert keyring.unseal(memoryview(sealed), key=CHUNK, tenant=tenant) == frame
    assert sealed_by(keyring, frame, tenant) != sealed, "never the same bytes twice"


@settings(max_examples=200)
@given(data=st.data())
def test_no_change_goes_unnoticed(data: st.DataObject) -> None:
    keyring = Keyring({"": [SECRET]})
    sealed = bytearray(sealed_by(keyring, b"some frame or other"))
    what = data.draw(st.sampled_from(["bit", "cut", "more"]))
    if what == "bit":
        sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "cut":
        del sealed[data.draw(st.integers(0, len(sealed) - 1)) :]
    else:
        sealed += data.draw(st.binary(min_size=1, max_size=30))
    with pytest.raises(FrameError, match="sealed"):
        keyring.unseal(memoryview(sealed), key=CHUNK, tenant="")


def test_it_opens_under_no_other_name() -> None:
    keyring = Keyring({"": [SECRET], "a": [SECRET]})  # even where two tenants have the same key
    sealed = memoryview(sealed_by(keyring, b"frame", "a"))
    for key, tenant in ((b"x" * 40, "a"), (CHUNK, ""), (CHUNK, "b")):
        with pytest.raises(FrameError, match="altered, or is another"):
            keyring.unseal(sealed, key=key, tenant=tenant)
    with pytest.raises(FrameError, match="none of a"):
        Keyring({"a": [bytes(KEY_BYTES)]}).unseal(sealed, key=CHUNK, tenant="a")


def test_the_key_itself_is_in_none_of_the_bytes() -> None:
    assert SECRET not in sealed_by(Keyring({"": [SECRET]}), SECRET)


@pytest.mark.parametrize(
    "text", [SECRET.hex().encode() + b"\n", base64.b64encode(SECRET)], ids=["hex", "base64"]
)
def test_keys_are_read_from_files(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "key").write_bytes(text)
    keyring = Keyring.read([f"a=file:{tmp_path / 'key'}"])
    assert keyring.seals("a")
    assert not keyring.seals("")
    assert (
        bytes(
            Keyring({"a": [SECRET]}).unseal(
                memoryview(sealed_by(keyring, b"frame", "a")), key=CHUNK, tenant="a"
            )
        )
        == b"frame"
    )


@pytest.mark.parametrize(
    "text",
    [SECRET + b"\xff", b"0" * 32, b"", b"0" * 63],
    ids=["too long", "weak text", "empty", "odd hex"],
)
def test_what_is_no_key_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "key").write_bytes(text)
    with pytest.raises(ConfigError, match="is not a key"):
        Keyring.read([f"=file:{tmp_path / 'key'}"])


def test_a_key_of_bytes_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xf0" + SECRET[1:])
    assert Keyring.read([f"=file:{tmp_path / 'key'}"]).seals("anybody")
