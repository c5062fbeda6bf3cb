"""Folders that are there whole or not at all, such as checkpoints made on this host: in the user's
cache folder, under a name that tells their content.

    path = make_once(root / f"tiny-{fingerprint(recipe)}", lambda folder: write(recipe, folder))
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def default_root() -> Path:
    """Where models are kept when nothing else is said."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvhold" / "models"


def fingerprint(recipe: Any) -> str:
    """12 hexadecimal digits of everything that decides a checkpoint's bytes, which JSON must be
    able to hold.
    """
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def make_once(path: Path, write: Callable[[Path], None]) -> Path:
    """The folder `path`; if it is not there, `write` fills an empty one, which then gets that name.

    Several processes may do so at once: one of them wins, and its folder is as good as the others'.
    Raises OSError if the folder cannot be written, and what `write` raises; nothing is left behind
    then.
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
