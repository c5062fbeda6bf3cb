"""The Dockerfile: what it names exists, and its images run as a user without rights."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhold import __version__
from kvhold.core.config import load_config
from kvhold.core.secrets import is_secret_name
from tests.programs import needed_program
from tools.setup_env import VLLM

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
IMAGES = ("node", "vllm-cpu", "vllm-cuda")


@dataclass(frozen=True)
class Instruction:
    word: str
    text: str


def instructions() -> Iterator[Instruction]:
    """Comments left out, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, text = line.partition(" ")
            yield Instruction(word, text.strip())


def stages() -> dict[str, list[Instruction]]:
    """By name; the instructions before the first one are those of ""."""
    found: dict[str, list[Instruction]] = {"": []}
    for one in instructions():
        if one.word == "FROM":
            found[one.text.split(" AS ")[1]] = []
        list(found.values())[-1].append(one)
    return found


def variables(stage: str) -> dict[str, str]:
    words = [word for one in stages()[stage] if one.word == "ENV" for word in one.text.split()]
    return dict(word.split("=", 1) for word in words)


def base_images() -> dict[str, str]:
    return dict(one.text.split("=", 1) for one in stages()[""] if one.word == "ARG")


def test_the_linter_finds_nothing() -> None:
    linter = needed_program("hadolint")
    # DL3006: the tags of base images are in the arguments above
    done = subprocess.run(
        [linter, "--no-color", "--ignore", "DL3006", DOCKERFILE], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_its_stages_are_built_from_pinned_images_and_from_each_other() -> None:
    bases, names = base_images(), list(stages())
    for image in bases.values():
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+[\w.-]*", image), image
    for name, stage in stages().items():
        if name:
            base = stage[0].text.split(" AS ")[0]
            argument = re.fullmatch(r"\$\{(\w+)\}", base)
            assert argument[1] in bases if argument else base in names[: names.index(name)]
    assert set(IMAGES) < set(names)
    assert {image.rpartition(":v")[2] for name, image in bases.items() if "VLLM" in name} == {VLLM}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_without_rights_and_holds_no_secret(image: str) -> None:
    users = [one.text for one in stages()[image] if one.word == "USER"]
    assert users[-1] == "10001:10001"
    named = [name for stage in stages() for name in variables(stage)]
    named += [one.text.partition("=")[0] for one in instructions() if one.word == "ARG"]
    assert [name for name in named if is_secret_name(name)] == []


@pytest.mark.parametrize("image", IMAGES)
def test_the_variables_of_an_image_are_settings(image: str) -> None:
    config = load_config(environ=variables(image))
    assert (config.node.socket, config.node.autostart) == ("/run/kvhold/node.sock", False)


def test_the_extras_exist() -> None:
    (argument,) = [one.text for one in instructions() if one.text.startswith("EXTRAS=")]
    extras = set(argument.removeprefix("EXTRAS=").split(","))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras <= set(project["optional-dependencies"])


def test_the_files_that_it_copies_suffice_for_a_wheel(tmp_path: Path) -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    copied = [
        source
        for one in stages()["wheel"]
        if one.word == "COPY"
        for source in one.text.split()[:-1]
    ]
    assert copied
    assert ignored[0] == "*"
    assert {f"!{source}" for source in copied} == {one for one in ignored if one.startswith("!")}
    for source in copied:
        if (ROOT / source).is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
            shutil.copytree(ROOT / source, tmp_path / "in" / source, ignore=skipped)
        else:
            (tmp_path / "in").mkdir(exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / "in" / source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "out", "."],
        cwd=tmp_path / "in",
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == f"kvhold-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    pages = [f"kvhold/control/pages/{page.name}" for page in _pages()]
    assert pages
    assert set(pages) <= set(names)


def _pages() -> list[Path]:
    return [
        page
        for page in (ROOT / "src/kvhold/control/pages").iterdir()
        if page.suffix in (".html", ".css", ".js")
    ]
