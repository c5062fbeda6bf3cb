"""Which weights these are, told the same on every host: KV of other weights must never be taken for theirs.

    model_identity("/models/llama", None)          # "content:..." from every byte of the folder's weights
    model_identity("org/llama", "main")            # "hub:org/llama@<commit>" of the copy in the local hub cache

A folder's files are hashed whole (xxh3, 128 bits; it guards against accidents, nobody gains by forging their own weights), once for each
state of a file: the digests are kept in the user's cache folder under the file's path, size, time and inode. The engine reads
the same files next, so the first hashing mostly warms the page cache for it.
"""

import logging
import os
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import xxhash

from kvhold.core.encoding import canonical
from kvhold.core.errors import LayoutError
from kvhold.core.sizes import format_size

log = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SETTINGS = ("config.json", "adapter_config.json")
_PIECE_BYTES = 8 << 20
_WORTH_A_LINE = 1 << 30


def model_identity(model: str, revision: str | None) -> str:
    """The name of a model's (or an adapter's) weights. Raises LayoutError when they cannot be told."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return f"content:{_folder_digest(folder)}"
    return f"hub:{model}@{_hub_commit(model, revision)}"


def _folder_digest(folder: Path) -> str:
    files = sorted(p for p in folder.iterdir() if p.is_file() and (p.suffix in _WEIGHTS or p.name in _SETTINGS))
    if not files:
        raise LayoutError(f"the model folder {folder} holds no weights to tell it by; set model_id to a name that is theirs alone")
    total = sum(file.stat().st_size for file in files)
    if total >= _WORTH_A_LINE:
        log.info("kvhold: telling %s of weights by their content; their digests are kept for the next start", format_size(total))
    return blake2b(canonical([[file.name, _file_digest(file)] for file in files]), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    status = path.stat()
    state = canonical([str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino])
    note = _notes_folder() / blake2b(state, digest_size=16).hexdigest()
    try:
        return note.read_text()
    except OSError:
        digest = _hash(path)
        _keep(note, digest)
        return digest


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    piece = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file, memoryview(piece) as view:
        while count := file.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


def _keep(note: Path, digest: str) -> None:
    """Write whole or not at all. Not being able to costs the next start its time, nothing else."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as draft:
            draft.write(digest)
        Path(draft.name).replace(note)
    except OSError as error:
        log.debug("kvhold: digests are not kept: %s", error)


def _notes_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvhold" / "weights"


def _hub_commit(model: str, revision: str | None) -> str:
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not the form of a hub's name
        for name in _SETTINGS:
            found = try_to_load_from_cache(model, name, revision=revision)
            if isinstance(found, str):
                return Path(found).parent.name  # .../snapshots/<commit>/config.json
    raise LayoutError(f"cannot tell which weights {model!r} names, because it is no folder and not in the local hub cache; set model_id")
