"""OSError becomes TierError only here."""

import os
from errno import (
    EACCES,
    EDQUOT,
    EFBIG,
    ENODEV,
    ENOENT,
    ENOSPC,
    ENOTCONN,
    ENOTDIR,
    ENXIO,
    EPERM,
    EROFS,
    ESHUTDOWN,
    ESTALE,
)

from kvhold.core.errors import TierDenied, TierError, TierFull, TierUnavailable
from kvhold.tiers.files.safe import Unsafe

_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})
_READ_ONLY = frozenset({EROFS})
_DENIED = frozenset({EACCES, EPERM})
_GONE = frozenset({ENOENT, ENOTDIR, ENODEV, ENXIO, ESTALE, ENOTCONN, ESHUTDOWN})


def as_tier_error(error: OSError, *, tier: str, operation: str, where: str) -> TierError:
    if isinstance(error, Unsafe):
        return TierDenied(
            tier,
            operation,
            f"{error}; or set any_owner=true, if those users may read and forge unencrypted values",
        )
    detail = f"{where}: {error.strerror or error}"
    if error.errno in _FULL:
        return TierFull(tier, operation, f"{detail}; make room there, or give this tier less")
    if error.errno in _READ_ONLY:
        return TierDenied(tier, operation, f"{detail}; mount it writable")
    if error.errno in _DENIED:
        return TierDenied(
            tier,
            operation,
            f"{detail}; give user id {os.geteuid()} the right to read and write there",
        )
    if error.errno in _GONE:
        return TierUnavailable(tier, operation, f"{detail}; is it mounted?")
    return TierError(tier, operation, detail)
