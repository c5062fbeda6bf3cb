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

from kvhold_lab.bench.rows import Row

KEPT_UNDER = 0.8
SECONDS = 1.0
_LINES = 40
_SERVING = "^(?!.*<module>).*(kvhold|asyncio|selectors|socket|epoll|msgspec)"

Work = Callable[[], object]


class Profiles:
    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def of(self, row: Row, look: Callable[[], str]) -> Row:
        if self._folder is None or row.ratio >= KEPT_UNDER:
            return row
        file = self._folder / f"{re.sub('[^a-z0-9]+', '-', row.name.lower())}.txt"
        file.write_text(look())
        return replace(row, profile=str(file))


def of_calls(work: Work, *, after: Work | None = None) -> str:
    """after: called after each call, not profiled"""
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
    """open_work: starts a server under these interpreter arguments"""
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        file = Path(folder) / "server"
        with open_work(("-m", "cProfile", "-o", str(file))) as work:
            client = of_calls(work)
        return (
            f"The client\n\n{client}\nThe server, without the imports of its "
            f"start\n\n{_text(str(file), _SERVING)}"
        )


def _text(profile: cProfile.Profile | str, only: str = "") -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(only, _LINES)
    return text.getvalue()
