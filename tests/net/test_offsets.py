"""Packed offsets: what is packed comes back, and what does not fit is refused."""

from array import array

import numpy as np
import pytest

from kvhold.core.api import ABSENT
from kvhold.core.errors import ProtocolError
from kvhold.net.offsets import pack, unpack


def test_what_is_packed_comes_back() -> None:
    rows = [array("q", [0, ABSENT, 1 << 40]), array("q", [4096, 8192, ABSENT])]
    offsets = unpack(pack(rows), 2, 3)
    assert offsets.dtype == np.int64
    assert offsets.flags.writeable, "compiled kernels take no other"
    assert offsets.tolist() == [list(row) for row in rows]


def test_no_groups_and_no_chunks() -> None:
    assert unpack([], 0, 3).shape == (0, 3)
    assert unpack([b"", b""], 2, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("rows", "refused"),
    [
        ([bytes(24)], "offsets of 1 groups for 2"),
        ([bytes(24), bytes(16)], "16 bytes of offsets for 3 chunks"),
        ([bytes(24), bytes(25)], "25 bytes of offsets for 3 chunks"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[bytes], refused: str) -> None:
    with pytest.raises(ProtocolError, match=refused):
        unpack(rows, 2, 3)
