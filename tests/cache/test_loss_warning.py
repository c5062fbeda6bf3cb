"""Settings that name a lossy codec for a tier, and allow no loss, are warned of at the start."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from tests.cache.wide import wide_cache
from tests.tiers.memory import Place, a_place

LOSSY = "int8"


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


def warnings(caplog: pytest.LogCaptureFixture, *tiers: str, **rules: Any) -> list[str]:
    with wide_cache(*tiers, rules=rules):
        pass
    return [line for line in caplog.messages if "loses precision" in line]


@pytest.mark.parametrize("rules", [{}, {"max_error": 0}, {"max_error": 0, "max_bits": 4}])
def test_settings_that_name_a_lossy_codec_and_allow_no_loss_are_told_the_fix(
    place: Place, caplog: pytest.LogCaptureFixture, rules: dict[str, float]
) -> None:
    (said,) = warnings(caplog, place.url(codec=LOSSY), "null://?name=hole", **rules)
    assert said.startswith(f"tier plugin: codec={LOSSY} loses precision")
    assert "set rules.max_error (1: any codec) or rules.max_bits" in said


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({"codec": "lossless"}, {}),
        ({"codec": "raw"}, {}),
        ({"codec": LOSSY, "read_only": "true"}, {}),
        ({"codec": LOSSY}, {"max_error": 0.01}),
        ({"codec": LOSSY}, {"max_bits": 8}),
    ],
    ids=str,
)
def test_others_are_not_warned(
    place: Place,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, str],
    rules: dict[str, float],
) -> None:
    assert warnings(caplog, place.url(**options), **rules) == []
