import asyncio

import pytest

from kvhold.core.cleanup import on_error


@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError, KeyboardInterrupt])
def test_steps_run_in_order_and_the_error_goes_on(error: type[BaseException]) -> None:
    done: list[str] = []
    with pytest.raises(error), on_error(lambda: done.append("first"), lambda: done.append("last")):
        raise error
    assert done == ["first", "last"]


def test_no_step_runs_after_success() -> None:
    done: list[str] = []
    with on_error(lambda: done.append("undone")):
        pass
    assert done == []
