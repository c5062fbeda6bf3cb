import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def default_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvhold" / "models"


def fingerprint(recipe: Any) -> str:
    """12 hexadecimal digits. The recipe must be JSON."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def make_once(path: Path, write: Callable[[Path], None]) -> Path:
    """If `path` is missing, `write` fills an empty folder, which is then renamed. Safe in several
    processes.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            draft = Path(scratch) / "draft"
            draft.mkdir()
            write(draft)
            _publish(draft, path)
    return path


def _publish(draft: Path, path: Path) -> None:
    try:
        draft.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
