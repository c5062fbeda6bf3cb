"""Mutations of the code: unified diffs against `src/` in `mutations/`.

A hunk's text must occur exactly once in its file.
"""

from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

_FOLDER = Path(__file__).with_name("mutations")


class PatchError(ValueError): ...


@dataclass(frozen=True)
class _Hunk:
    file: str
    before: str
    after: str


def mutations(*, rare: bool = False) -> list[Path]:
    return sorted(_FOLDER.rglob("*.patch") if rare else _FOLDER.glob("*.patch"))


def apply(patch: Path, folder: Path) -> None:
    """folder: contains `kvhold`, which may be compiled. Raises PatchError."""
    hunks = _hunks(patch.read_text())
    if not hunks:
        raise PatchError(f"{patch.name}: the patch has no hunk")
    for hunk in hunks:
        file = folder / hunk.file
        text = file.read_text() if file.is_file() else ""
        count = text.count(hunk.before)
        if not hunk.before or count != 1:
            raise PatchError(
                f"{patch.name}: {hunk.file} has {count} places like this; there must be exactly "
                f"one:\n{hunk.before}"
            )
        file.write_text(text.replace(hunk.before, hunk.after))
        Path(cache_from_source(file)).unlink(missing_ok=True)


def _hunks(text: str) -> list[_Hunk]:
    hunks: list[_Hunk] = []
    file, before, after = "", "", ""
    for line in [*text.splitlines(keepends=True), "@@\n"]:
        if line.startswith(("--- ", "@@")):
            if before or after:
                hunks.append(_Hunk(file, before, after))
            before = after = ""
        elif line.startswith("+++ "):
            file = line[4:].split("\t")[0].strip().removeprefix("b/")
        elif line.startswith("-"):
            before += line[1:]
        elif line.startswith("+"):
            after += line[1:]
        else:
            before += line[1:]
            after += line[1:]
    return hunks
