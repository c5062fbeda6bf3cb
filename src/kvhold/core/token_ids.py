from array import array
from contextlib import suppress

import numpy as np
import numpy.typing as npt


def as_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Contiguous int32. Raises ValueError: more axes, or no 32-bit integers."""
    if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
        with suppress(TypeError, OverflowError):
            # three times as fast as signed, four times numpy
            numbers = array("I")
            numbers.fromlist(tokens)
            unsigned = np.frombuffer(numbers, np.uintc)
            if unsigned.max() <= np.iinfo(np.int32).max:
                found = unsigned.view(np.intc).astype("<i4", copy=False)
                found.flags.writeable = False
                return found
    found = np.asarray(tokens)
    if found.size == 0:
        return np.empty(0, dtype="<i4")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(
            f"tokens must be one axis of integers, not {found.dtype} with shape {found.shape}"
        )
    if found.dtype != np.dtype("<i4"):
        if found.max() > np.iinfo(np.int32).max or found.min() < np.iinfo(np.int32).min:
            raise ValueError("a token id does not fit 32 bits")
        found = found.astype("<i4")
    found = np.ascontiguousarray(found)
    # the owner of a read-only view may still write
    is_somebodys = found.base is not None and not found.flags.writeable
    return found.copy() if is_somebodys else found
