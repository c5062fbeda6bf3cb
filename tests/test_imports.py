"""The table of allowed imports holds for kvhold, and the contract that checks it can tell when it
does not. No public class name is used twice.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

TABLE = """
[tool.importlinter]
root_package = "house"
contract_types = ["house: tools.import_rules.HouseContract"]
[[tool.importlinter.contracts]]
name = "table"
type = "house"
[tool.importlinter.contracts.may_import]
core = []
tiers = ["core"]
cache = ["tiers"]
cli = ["*"]
"""

LATE = "def late():\n    from house.tiers import disk"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import tiers"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
        "--no-logo",
    ]
    sources = (folder, REPOSITORY, REPOSITORY / "src", REPOSITORY / "lab" / "src")
    path = os.pathsep.join(map(str, sources))
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small package in which all is as its table allows; `cache` and `cli` are not built yet."""
    for package in ("", "core", "tiers"):
        (tmp_path / "house" / package).mkdir()
        (tmp_path / "house" / package / "__init__.py").touch()
    (tmp_path / "house" / "__init__.py").write_text(
        "from house.tiers import disk\n__version__ = '1'\n"
    )
    (tmp_path / "house" / "tiers" / "disk.py").write_text(
        "from house import __version__\nimport house.core\n"
    )
    (tmp_path / "pyproject.toml").write_text(TABLE)
    return tmp_path


def test_kvhold_keeps_its_table() -> None:
    done = lint(REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_package_of_the_table_may_still_be_missing(house: Path) -> None:
    done = lint(house)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        pytest.param(
            "core/keys.py",
            "import house.tiers.disk",
            "core may not import tiers: house.core.keys:1",
            id="at the top",
        ),
        pytest.param(
            "core/keys.py", LATE, "core may not import tiers: house.core.keys:2", id="in a function"
        ),
        pytest.param(
            "core/keys.py",
            FOR_TYPES,
            "core may not import tiers: house.core.keys:3",
            id="for types only",
        ),
        pytest.param(
            "cache/__init__.py",
            "import house.core",
            "cache may not import core: house.cache:1",
            id="by way of another",
        ),
        pytest.param(
            "core/keys.py",
            "from house import disk",
            "core may not import the root package house",
            id="through the root",
        ),
        pytest.param("attic/__init__.py", "", "attic has no row", id="unknown package"),
        pytest.param("attic.py", "", "attic has no row", id="unknown module"),
    ],
)
def test_an_import_or_package_outside_the_table_is_named(
    house: Path, module: str, source: str, fault: str
) -> None:
    file = house / "house" / module
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    done = lint(house)
    assert done.returncode == 1, done.stdout + done.stderr
    assert fault in done.stdout


def test_the_command_line_may_import_anything(house: Path) -> None:
    (house / "house" / "cli.py").write_text("import house.core, house.tiers")
    assert lint(house).returncode == 0


def test_no_public_class_name_is_used_twice() -> None:
    names = Counter(
        name
        for folder in ("src", "lab/src")
        for path in (REPOSITORY / folder).rglob("*.py")
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE)
    )
    assert len(names) > 300
    assert [name for name, uses in names.items() if uses > 1] == []


def test_no_file_and_no_function_of_the_product_is_too_long() -> None:
    for path in sorted((REPOSITORY / "src").rglob("*.py")):
        text = path.read_text()
        assert text.count("\n") <= 600, path
        if "kernels" in path.parts:
            continue
        for found in ast.walk(ast.parse(text)):
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
                assert found.end_lineno is not None
                assert found.end_lineno - found.lineno < 80, (path, found.name)
