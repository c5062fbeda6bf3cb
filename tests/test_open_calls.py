"""A rule for the code that opens files in places that others may know: nothing there follows a link
that another user has planted.

Every file of the node's and of the tiers on file systems is opened by `tiers/files/safe.py`, or
relative to a folder that it has opened and with O_NOFOLLOW. What else opens a path stands in a
list, with its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kvhold"
PLACES = ("node", "tiers/disk", "tiers/files", "tiers/fs.py")
OPENS = {
    "open",
    "fdopen",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "mkdir",
    "makedirs",
    "mkstemp",
    "mkdtemp",
}
SAFE = "tiers/files/safe.py"
ALLOWED = {
    ("node/logs.py", "open(fd"): "a descriptor",
    ("node/start.py", "os.fdopen(open_beside("): "a descriptor of a file that was checked",
    (
        "tiers/files/tree.py",
        "os.mkdir(name, mode=448, dir_fd=self._root",
    ): "in an open folder; mkdir follows nothing",
}


def calls(path: Path) -> Iterator[ast.Call]:
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.Call):
            name = (
                found.func.attr
                if isinstance(found.func, ast.Attribute)
                else getattr(found.func, "id", "")
            )
            if name in OPENS:
                yield found


def is_harmless(text: str) -> bool:
    """A method of ours that is called `open`; or a place of the kernel's, where nobody plants
    anything.
    """
    return text.startswith(
        (
            "FileTree.open(",
            "Folder.open(",
            "self._open(",
            "os.open(os.devnull, ",
            "Path('/proc/",
            "Path(f'/proc/",
        )
    )


def is_safe_open(call: ast.Call) -> bool:
    """`os.open` relative to a folder, without following a link."""
    flags = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
    relative = any(keyword.arg == "dir_fd" for keyword in call.keywords)
    return (
        ast.unparse(call.func) == "os.open"
        and relative
        and any(name in flags for name in ("O_NOFOLLOW", "_FILE", "flags"))
    )


def test_the_node_and_the_tiers_on_files_follow_no_links() -> None:
    wrong, used = [], set()
    for place in PLACES:
        for path in (
            [SOURCE / place] if place.endswith(".py") else sorted((SOURCE / place).rglob("*.py"))
        ):
            name = str(path.relative_to(SOURCE))
            if name == SAFE:
                continue
            for call in calls(path):
                text = ast.unparse(call)
                allowed = {key for key in ALLOWED if key[0] == name and text.startswith(key[1])}
                used |= allowed
                if not (allowed or is_harmless(text) or is_safe_open(call)):
                    wrong.append(f"{name}:{call.lineno}: {text}")
    assert wrong == []
    assert used == set(ALLOWED), "the list has what is no longer there"
