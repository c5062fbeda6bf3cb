"""Tests against the real SGLang, which lies in a folder of its own (tools/setup_env.py), so that
nothing else in the environment sees it.

They are collected only when they are meant (`-m sglang`, or a path in this folder): SGLang must not
be imported into a process that tests vLLM. Where it is not installed they are left out, and
`test_settings.py` says so.
"""

from pathlib import Path

import pytest

from tests.sglang.bring import bring_sglang

_HERE = Path(__file__).parent
_NEED_NO_SGLANG = ("test_settings.py",)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    if (
        file_path.name.startswith("test_")
        and file_path.name not in _NEED_NO_SGLANG
        and _are_meant(parent.config)
    ):
        bring_sglang()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_") or collection_path.name in _NEED_NO_SGLANG:
        return None
    return None if _are_meant(config) and bring_sglang() else True


def _are_meant(config: pytest.Config) -> bool:
    named = [
        (config.invocation_params.dir / argument.split("::")[0]).resolve()
        for argument in config.args
    ]
    return config.option.markexpr == "sglang" or any(
        path == _HERE or _HERE in path.parents for path in named
    )
