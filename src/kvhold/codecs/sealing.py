"""Encrypted frames (AES-256-GCM): a tier cannot read, swap or alter chunks unnoticed.

Each frame has its own key (docs/format.md). A tenant's first key seals; all its keys unseal. Any
thread; releases the GIL.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from mmap import mmap
from pathlib import Path
from struct import Struct

from kvhold.core.errors import ConfigError, FrameError
from kvhold.core.secrets import warn_if_public

MAGIC = b"\x89kvseal\n"
VERSION = 1
KEY_BYTES = 32
_TAG_BYTES = 16
_SPARE_BYTES = 16  # the library needs them after its output
_HEAD = Struct("<8sHH8s32s")  # magic, version, flags, identity of the key, random bytes
OVERHEAD_BYTES = _HEAD.size + _TAG_BYTES

Parts = Sequence[memoryview]


@dataclass(frozen=True)
class _Key:
    secret: bytes
    identity: bytes


class Keyring:
    """The keys of "" are for tenants without keys."""

    def __init__(self, keys: Mapping[str, Sequence[bytes]]) -> None:
        """Raises ConfigError. keys: KEY_BYTES each."""
        try:
            import cryptography  # noqa: F401 - fail now, not at the first frame
        except ImportError as error:
            raise ConfigError(
                "encryption needs the cryptography library: pip install "
                f"'kvhold[encryption]' ({error})"
            ) from error
        self._keys: dict[str, list[_Key]] = {}
        for tenant, secrets in keys.items():
            if not secrets or any(len(secret) != KEY_BYTES for secret in secrets):
                raise ConfigError(
                    f"encryption.keys: a key of {tenant or 'all'} does not have {KEY_BYTES} bytes"
                )
            self._keys[tenant] = [_Key(secret, _identity(secret)) for secret in secrets]

    @classmethod
    def read(cls, lines: Sequence[str], environ: Mapping[str, str] = os.environ) -> "Keyring":
        """`TENANT=file:PATH` or `TENANT=env:NAME`. Raises ConfigError, showing no key."""
        keys: dict[str, list[bytes]] = {}
        for line in lines:
            tenant, equals, source = line.partition("=")
            kind, colon, place = source.partition(":")
            if not equals or not colon or kind not in ("file", "env") or not place:
                raise ConfigError(
                    f"encryption.keys: {tenant!r} needs =file:PATH or =env:NAME after it"
                )
            keys.setdefault(tenant, []).append(_read_key(kind, place, environ))
        return cls(keys)

    def seals(self, tenant: str) -> bool:
        return bool(self._of(tenant))

    def seal(self, parts: Parts, *, key: bytes, tenant: str) -> Parts:
        """Raises KeyError if the tenant has no key."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        keys = self._of(tenant)
        if not keys:
            raise KeyError(tenant)
        head = _HEAD.pack(MAGIC, VERSION, 0, keys[0].identity, os.urandom(32))
        nbytes = sum(part.nbytes for part in parts)
        sealed = memoryview(mmap(-1, nbytes + OVERHEAD_BYTES + _SPARE_BYTES))
        sealed[: len(head)] = head
        secret, nonce = _derived(keys[0], head, key, tenant)
        encryptor = Cipher(algorithms.AES(secret), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(head + key)
        end = len(head)
        for part in parts:
            end += encryptor.update_into(part, sealed[end:])
        encryptor.finalize()
        sealed[end : end + _TAG_BYTES] = encryptor.tag
        return (sealed[: end + _TAG_BYTES],)

    def unseal(self, sealed: memoryview, *, key: bytes, tenant: str) -> memoryview:
        """Raises FrameError, with reason "sealed" if it was altered."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        if len(sealed) < OVERHEAD_BYTES:
            raise FrameError(
                "sealed", f"{len(sealed)} bytes; a sealed frame has at least {OVERHEAD_BYTES}"
            )
        head = bytes(sealed[: _HEAD.size])
        magic, version, flags, identity, _ = _HEAD.unpack(head)
        if magic != MAGIC or version != VERSION or flags:
            raise FrameError(
                "sealed",
                f"it begins with {head[:12].hex()}: not a sealed frame, or an unknown version",
            )
        known = next((one for one in self._of(tenant) if one.identity == identity), None)
        if known is None:
            raise FrameError(
                "sealed", f"its key {identity.hex()} is none of {tenant or 'the common ones'}"
            )
        secret, nonce = _derived(known, head, key, tenant)
        end = len(sealed) - _TAG_BYTES
        decryptor = Cipher(algorithms.AES(secret), modes.GCM(nonce)).decryptor()
        decryptor.authenticate_additional_data(head + key)
        frame = memoryview(mmap(-1, end - _HEAD.size + _SPARE_BYTES))
        nbytes = decryptor.update_into(sealed[_HEAD.size : end], frame)
        try:
            decryptor.finalize_with_tag(bytes(sealed[end:]))
        except InvalidTag:
            raise FrameError(
                "sealed", "it was altered, or is another chunk's or tenant's"
            ) from None
        return frame[:nbytes]

    def _of(self, tenant: str) -> list[_Key]:
        return self._keys.get(tenant) or self._keys.get("", [])


def _derived(of: _Key, head: bytes, key: bytes, tenant: str) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    name = tenant.encode()
    info = b"kvhold-seal-1" + len(name).to_bytes(2, "little") + name + key
    both = HKDF(SHA256(), KEY_BYTES + 12, salt=head[-32:], info=info).derive(of.secret)
    return both[:KEY_BYTES], both[KEY_BYTES:]


def _identity(secret: bytes) -> bytes:
    return blake2b(b"", key=secret, digest_size=8, person=b"kvhold-key-id").digest()


def _read_key(kind: str, place: str, environ: Mapping[str, str]) -> bytes:
    where = f"encryption.keys: {kind}:{place}"
    if kind == "env":
        if place not in environ:
            raise ConfigError(f"{where} is not set")
        raw = environ[place].encode()
    else:
        try:
            with Path(place).open("rb") as file:
                warn_if_public(file.fileno(), place)
                raw = file.read(1024)
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from None
    # 32 ASCII characters are a weak key, or a truncated one
    as_is = None if raw.isascii() else raw
    for found in (as_is, _hex(raw.strip()), _base64(raw.strip())):
        if found is not None and len(found) == KEY_BYTES:
            return found
    raise ConfigError(
        f"{where} is not a key: {KEY_BYTES} bytes, raw, in hexadecimal or in "
        "base64 (`openssl rand -hex 32`)"
    )


def _hex(text: bytes) -> bytes | None:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None


def _base64(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
