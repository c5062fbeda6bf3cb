"""Codecs are found by name: ours, and those that an installed plugin names."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvhold.codecs import Raw, codec_names, find_codec, make_codec
from kvhold.core.errors import ConfigError

PLUGIN = """
class Twice:
    name = "twice"
class Misnamed:
    name = "other"
"""
ENTRY_POINTS = """
[kvhold.codecs]
twice = plugin:Twice
misnamed = plugin:Misnamed
missing = plugin:Missing
nowhere = no_such_module:Codec
"""


def run_with_plugin(folder: Path, code: str) -> str:
    """What `code` prints where a distribution with PLUGIN is installed."""
    (folder / "plugin.py").write_text(PLUGIN)
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom kvhold.codecs import *\nfrom "
        f"kvhold.core.errors import ConfigError\n{code}"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_our_codecs_are_found_and_shared() -> None:
    assert isinstance(make_codec("raw"), Raw)
    assert make_codec("raw") is find_codec("raw")
    assert "raw" in codec_names()


def test_our_codecs_are_named_and_compiled_only_when_asked_for() -> None:
    assert {"fp8", "int8", "lossless", "raw"} <= set(codec_names())
    code = (
        "import sys; from kvhold.codecs import *; make_codec('raw'); print(len(codec_names()), "
        "'numba' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(found[0]) >= 4 and found[1] == "False"


def test_without_numba_a_codec_says_what_to_install_and_its_frames_are_unknown() -> None:
    code = """
import sys
sys.modules["numba"] = None
from kvhold.codecs import *
from kvhold.core.errors import ConfigError
for name in ("fp8", "int8", "lossless"):
    try:
        make_codec(name)
    except ConfigError as error:
        print(find_codec(name), error, sep="|")
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(found) == 3
    assert all(line.startswith("None|") and "pip install 'kvhold[numba]'" in line for line in found)


def test_an_unknown_name_is_an_error_in_settings_and_nothing_in_a_frame() -> None:
    with pytest.raises(ConfigError, match="did you mean 'raw'"):
        make_codec("raww")
    assert find_codec("raww") is None
    assert find_codec("no.such:thing") is None


def test_a_plugin_is_found_by_its_entry_point_and_imported_only_when_asked_for(
    tmp_path: Path,
) -> None:
    code = (
        "print('twice' in codec_names(), 'plugin' in sys.modules, "
        "type(make_codec('twice')).__name__, find_codec('twice').name)"
    )
    assert run_with_plugin(tmp_path, code).split() == ["True", "False", "Twice", "twice"]


def test_a_broken_plugin_is_an_error_in_settings_and_nothing_in_a_frame(tmp_path: Path) -> None:
    code = """
for name in ("misnamed", "missing", "nowhere"):
    try:
        make_codec(name)
    except ConfigError as error:
        print(name, find_codec(name), error, sep="|")
"""
    lines = [line.split("|") for line in run_with_plugin(tmp_path, code).splitlines()]
    assert [line[:2] for line in lines] == [
        ["misnamed", "None"],
        ["missing", "None"],
        ["nowhere", "None"],
    ]
    assert (
        "calls itself 'other'" in lines[0][2]
        and "cannot be loaded" in lines[1][2]
        and "no_such_module" in lines[2][2]
    )
