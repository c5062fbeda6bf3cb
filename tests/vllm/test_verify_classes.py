"""`kvhold verify` on a real vLLM: every class of models that this build runs passes.

Each class runs as vLLM runs it by default and in two of the five other paths, so that each of these
has three classes or more. `kvhold verify --all-classes` runs all, in twice the time.
"""

import pytest

pytest.importorskip("torch", reason="no torch in this environment")

from kvhold_lab.verify.paths import DEFAULT
from tests.vllm.verifying import (
    IN_BFLOAT16,
    PASSING,
    REFUSED_PATHS,
    Verified,
    assert_passed,
    verify,
    verify_beside,
)

# All classes are one test's fixture, which takes long, and both cores.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3_600)]


OTHERS = DEFAULT[1:]
PATHS = {
    name: (DEFAULT[0], *(OTHERS[(2 * number + step) % len(OTHERS)] for step in (0, 1)))
    for number, name in enumerate(reversed(PASSING))
}
ROWS = [(name, path) for name, paths in PATHS.items() for path in paths]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """Two classes at a time, each on a core, but for the one that runs alone."""
    folder = tmp_path_factory.mktemp("verify")
    alone = verify(folder, *arguments([IN_BFLOAT16]))
    of_paths = [
        [name for name in PASSING if PATHS[name] == paths and name != IN_BFLOAT16]
        for paths in dict.fromkeys(PATHS.values())
    ]
    beside = verify_beside(folder, [arguments(names) for names in of_paths if names])
    return Verified(
        beside.exit_codes + alone.exit_codes, beside.output + alone.output, beside.rows | alone.rows
    )


def arguments(names: list[str]) -> list[str]:
    """names: classes with the same paths"""
    return ["--classes", ",".join(names), "--paths", ",".join(PATHS[names[0]])]


@pytest.mark.parametrize(("name", "path"), ROWS)
def test_a_class_that_this_vllm_runs_passes(classes: Verified, name: str, path: str) -> None:
    row = classes.rows[name, path]
    if (name, path) in REFUSED_PATHS:
        assert (row["outcome"], row["kv_exact"]) == ("refused", None), classes.output
        assert REFUSED_PATHS[name, path] in row["reason"]
    else:
        assert_passed(row, classes.output)


def test_the_command_ends_well_and_shows_every_row(classes: Verified) -> None:
    assert set(classes.exit_codes) == {0}, classes.output
    assert classes.rows.keys() == set(ROWS)
    assert all(f"\n{name}" in classes.output for name in PASSING)


def test_each_path_has_three_classes_and_each_refusal_is_seen() -> None:
    assert all(sum(path == other for _, other in ROWS) >= 3 for path in DEFAULT)
    assert set(ROWS) >= REFUSED_PATHS.keys()
