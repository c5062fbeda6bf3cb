"""Digests of weights, equal on every host. Every file but `HARMLESS_FILES` is hashed whole (xxh3,
128 bits). Digests are kept in the user's cache folder, by path, size, times and inode; damaged or
another user's do not count.
"""

import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path

import xxhash

from kvhold.core.encoding import Plain, canonical
from kvhold.core.errors import LayoutError
from kvhold.core.sizes import format_size

log = logging.getLogger(__name__)

_SETTINGS = ("config.json", "adapter_config.json")
_PIECE_BYTES = 8 << 20
_WORTH_A_LINE = 1 << 30
_MAX_FILES = 20_000
_SETTLED_NS = 2_000_000_000  # file systems round times
_NOTE_BYTES = 65  # digest, blank, check
_DIGEST = re.compile("[0-9a-f]{32}")
_COMMIT = re.compile("[0-9a-f]{40}")

HARMLESS_FILES = {
    "documents and pictures": "*.md *.pdf *.png *.jpg *.jpeg *.gif *.svg *.html "
    "LICENSE* NOTICE* USE_POLICY*",
    "how text becomes tokens, which are in the key": "tokenizer* vocab* merges.txt "
    "special_tokens_map.json added_tokens.json"
    " chat_template* *.tiktoken *.spm",
    "how tokens are sampled": "generation_config.json",
    "logs, locks and files that are not complete": "*.log *.lock *.incomplete *.tmp "
    "events.out.tfevents.*",
}
"""Names of files that do not count, by the reason.

Files and folders that begin with a dot, and __pycache__, do not count, either.
"""

ALWAYS_NAMED = "*.safetensors *.bin *.pt *.pth *.ckpt *.gguf *.npz *.tensors *.py"
"""Names of files with weights or code. They count even if `HARMLESS_FILES` matches
(`tokenizer-codec.safetensors`).
"""

_HARMLESS = tuple(pattern for patterns in HARMLESS_FILES.values() for pattern in patterns.split())


def model_identity(model: str, revision: str | None, *, cache_dir: str | None = None) -> str:
    """ "content:<digest>" or "hub:<name>@<commit>". Raises LayoutError.

    cache_dir: the weights' hub cache; None: the hub's default
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return f"content:{_digest_of(path, files_of(path))}"
    if path.is_file():
        return f"content:{_digest_of(path.parent, [path])}"
    if cache_dir is not None:
        return f"hub:{model}@{_commit_in(Path(cache_dir).expanduser(), model, revision)}"
    return f"hub:{model}@{_hub_commit(model, revision)}"


def adapter_identity(folder: str) -> str:
    path = Path(folder).expanduser()
    if path.is_dir():
        return f"content:{_digest_of(path, files_of(path, subfolders=False))}"
    return model_identity(folder, None)


def adapter_places(folder: str) -> list[Path]:
    """Files that may change the adapter. Raises LayoutError."""
    path = Path(folder).expanduser()
    if path.is_dir():
        return files_of(path, subfolders=False)
    if path.is_file():
        return [path]
    found = _in_hub_cache(folder, None, _SETTINGS)
    return [found.parents[2] / "refs" / "main", found]


def code_identity(model: str, auto_map: object, code_revision: str | None) -> list[str]:
    """Hub code, except `model` at its own revision. Raises LayoutError: code outside the local
    cache.
    """
    found = set()
    for repository, file in _code_files(auto_map):
        if repository or (code_revision and not Path(model).expanduser().exists()):
            name = repository or model
            found.add(f"hub:{name}@{_hub_commit(name, code_revision, names=(file,))}")
    return sorted(found)


def files_of(folder: Path, *, subfolders: bool = True) -> list[Path]:
    """Sorted; follows links. Raises LayoutError: more than `_MAX_FILES`."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = (
            sorted(name for name in folders if name[0] != "." and name != "__pycache__")
            if subfolders
            else []
        )
        if real in seen:  # a link to a folder above it
            folders[:] = []
            continue
        seen.add(real)
        found += [Path(place, name) for name in names if name[0] != "." and not _is_harmless(name)]
        if len(found) > _MAX_FILES:
            raise LayoutError(
                f"{folder} holds more than {_MAX_FILES} files, so its weights cannot be "
                "identified; set model_id"
            )
    return sorted(path for path in found if path.is_file())


def file_digest(path: Path) -> str:
    return _file_digest(path)


def _is_harmless(name: str) -> bool:
    if any(fnmatchcase(name.lower(), pattern) for pattern in ALWAYS_NAMED.split()):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _HARMLESS)


def _digest_of(folder: Path, files: list[Path]) -> str:
    if not files:
        raise LayoutError(
            f"the model folder {folder} holds no weights to identify it by; set model_id to a "
            "unique name"
        )
    try:
        total = sum(file.stat().st_size for file in files)
        if total >= _WORTH_A_LINE:
            log.info(
                "kvhold: hashing %s of weights to identify them; the digests are kept "
                "for the next start",
                format_size(total),
            )
        named: list[Plain] = [[str(file.relative_to(folder)), _file_digest(file)] for file in files]
    except OSError as error:
        raise LayoutError(f"cannot read the weights in {folder}: {error}; set model_id") from None
    return blake2b(canonical(named), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    state = _state_of(path)
    folder = _notes_folder()
    name = blake2b(state, digest_size=16).hexdigest()
    digest = _noted(folder / name, state) if _is_ours(folder) else None
    if digest is None:
        digest = _hash(path)
        # changes within the clock's resolution
        if _state_of(path) == state and _last_change(path) < time.time_ns() - _SETTLED_NS:
            _keep(folder / name, state, digest)
    return digest


def _last_change(path: Path) -> int:
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _state_of(path: Path) -> bytes:
    status = path.stat()
    return canonical(
        [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    )


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    piece = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file, memoryview(piece) as view:
        while count := file.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


def _noted(note: Path, state: bytes) -> str | None:
    """None: no note, another user's, or damaged."""
    try:
        with os.fdopen(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            text = file.read(_NOTE_BYTES + 1).decode("ascii", "replace")
    except OSError:
        return None
    digest, _, check = text.partition(" ")
    return digest if _DIGEST.fullmatch(digest) and check == _check(state, digest) else None


def _keep(note: Path, state: bytes, digest: str) -> None:
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(note.parent):
            return
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as draft:
            draft.write(f"{digest} {_check(state, digest)}")
            draft.flush()
            os.fsync(draft.fileno())
        Path(draft.name).replace(note)
    except OSError as error:
        log.debug("kvhold: digests are not kept: %s", error)


def _check(state: bytes, digest: str) -> str:
    return blake2b(state + digest.encode(), digest_size=16).hexdigest()


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)
        return True
    except OSError:
        return False


def _notes_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvhold" / "weights"


def _hub_commit(model: str, revision: str | None, names: Sequence[str] = _SETTINGS) -> str:
    return _snapshot_of(_in_hub_cache(model, revision, names))


def _commit_in(folder: Path, model: str, revision: str | None) -> str:
    place = folder / f"models--{model.replace('/', '--')}"
    reference = place / "refs" / (revision or "main")
    with suppress(OSError, UnicodeError):
        commit = reference.read_text().strip() if reference.is_file() else revision or ""
        if _COMMIT.fullmatch(commit) and (place / "snapshots" / commit).is_dir():
            return commit
    raise LayoutError(
        f"cannot identify the weights of {model!r}, because {folder} has no snapshot of its "
        "revision; set model_id"
    )


def _in_hub_cache(model: str, revision: str | None, names: Sequence[str]) -> Path:
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not the form of a hub's name
        for name in names:
            found = try_to_load_from_cache(model, name, revision=revision)
            if isinstance(found, str):
                return Path(found)
    raise LayoutError(
        f"cannot identify the weights of {model!r}: it is not a folder, and not in "
        "the local hub cache; set model_id"
    )


def _snapshot_of(path: Path) -> str:
    parts = path.parts
    return parts[parts.index("snapshots") + 1]


def _code_files(auto_map: object) -> list[tuple[str, str]]:
    found = []
    for value in auto_map.values() if isinstance(auto_map, Mapping) else ():
        for reference in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(reference, str):
                repository, _, name = reference.rpartition("--")
                found.append((repository, f"{name.rpartition('.')[0]}.py"))
    return found
