"""`kvhold verify` on a real vLLM: every class of models that this build runs passes."""

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


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """The classes that pass, in all paths that a user's model is verified in by default; half of
    them on each of two cores.
    """
    folder, paths = tmp_path_factory.mktemp("verify"), ["--paths", ",".join(DEFAULT)]
    steady = [name for name in PASSING if name != IN_BFLOAT16]
    beside = verify_beside(
        folder, [["--classes", ",".join(steady[half::2]), *paths] for half in (0, 1)]
    )
    alone = verify(folder, "--classes", IN_BFLOAT16, *paths)
    return Verified(
        beside.exit_codes + alone.exit_codes, beside.output + alone.output, beside.rows | alone.rows
    )


@pytest.mark.parametrize("path", DEFAULT)
@pytest.mark.parametrize("name", PASSING)
def test_a_class_that_this_vllm_runs_passes(classes: Verified, name: str, path: str) -> None:
    row = classes.rows[name, path]
    if (name, path) in REFUSED_PATHS:
        assert (row["outcome"], row["kv_exact"]) == ("refused", None), classes.output
        assert REFUSED_PATHS[name, path] in row["reason"]
    else:
        assert_passed(row, classes.output)


def test_the_command_ends_well_and_shows_every_row(classes: Verified) -> None:
    assert classes.exit_codes == [0, 0, 0], classes.output
    assert classes.rows.keys() == {(name, path) for name in PASSING for path in DEFAULT}
    assert all(f"\n{name}" in classes.output for name in PASSING)
