"""Where the time goes of what stays under its limit.

    profiles = Profiles(folder)  # without a folder none is kept
    row = profiles.of(row, lambda: of_calls(work))  # the row, and the name of the file that was
    kept for it row = profiles.of(row, lambda: of_both(open_server_and_work))

By cProfile, which slows down calls of Python more than anything else: it says what is called how
often, the rows say how long it takes.
"""

import cProfile
import io
import pstats
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from kvhold.lab.bench.rows import Row

KEPT_UNDER = 0.8
SECONDS = 1.0  # of calls, for one profile
_LINES = 40
_SERVING = "^(?!.*<module>).*(kvhold|asyncio|selectors|socket|epoll|msgspec)"

Work = Callable[[], object]


class Profiles:
    """Files in one folder, one for each row under KEPT_UNDER of its limit."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: is made if it is not there; None: no profile is kept."""
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def of(self, row: Row, look: Callable[[], str]) -> Row:
        """The row, with the file that now holds what `look` returns if the row is one to be looked
        at.
        """
        if self._folder is None or row.ratio >= KEPT_UNDER:
            return row
        file = self._folder / f"{re.sub('[^a-z0-9]+', '-', row.name.lower())}.txt"
        file.write_text(look())
        return replace(row, profile=str(file))


def of_calls(work: Work, *, after: Work | None = None) -> str:
    """What `work` spends its time in, called for SECONDS. after: follows each call, and is left
    out.
    """
    profile = cProfile.Profile()
    until = time.perf_counter() + SECONDS
    while True:
        with profile:
            work()
        if after is not None:
            after()
        if time.perf_counter() >= until:
            return _text(profile)


def of_both(open_work: Callable[[Sequence[str]], AbstractContextManager[Work]]) -> str:
    """What client and server spend their time in. open_work: starts the server under these
    arguments to its interpreter; gives the work.
    """
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        file = Path(folder) / "server"
        with open_work(("-m", "cProfile", "-o", str(file))) as work:
            client = of_calls(work)
        return (
            f"The client\n\n{client}\nThe server, without the imports of its "
            f"start\n\n{_text(str(file), _SERVING)}"
        )


def _text(profile: cProfile.Profile | str, only: str = "") -> str:
    """only: a regular expression that the lines have."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(only, _LINES)
    return text.getvalue()
