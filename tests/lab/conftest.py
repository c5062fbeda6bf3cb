"""Child processes run what other tests measure, or a copy of the code."""

import pytest


@pytest.fixture(autouse=True)
def _unmeasured(unmeasured_children: None) -> None:
    pass
