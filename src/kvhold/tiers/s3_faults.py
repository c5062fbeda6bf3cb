"""A TierError's message has no header, key or signature."""

import re
from dataclasses import dataclass
from typing import Final

from obstore.exceptions import BaseError, InvalidPathError

from kvhold.core.errors import TierDenied, TierError, TierFull, TierUnavailable

OBSTORE_FAULTS: Final = (BaseError, OSError, ValueError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_KEPT = re.compile(r"DeleteObjects request failed for key .*\(code: (\w{1,100})\)")
_SYSTEM = re.compile(r'(?:message|error): "([^"\\]{1,200})"')

_FULL = frozenset(
    {"QuotaExceeded", "EntityTooLarge", "InsufficientCapacity", "StorageFull", "XMinioStorageFull"}
)
_ANOTHER_REGION = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_NO_CREDENTIALS = (
    "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the options "
    "access_key_id and secret_access_key,"
    " or give this instance a role"
)
_METADATA_PATHS = (
    "/latest/api/token",
    "/latest/meta-data/",
    "Error performing GET http://169.254.170.2",
)


@dataclass(frozen=True)
class BucketPlace:
    tier: str
    bucket: str
    endpoint: str

    def __str__(self) -> str:
        return f"bucket {self.bucket!r} at {self.endpoint or 'AWS'}"


def status_of(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def is_missing_object(error: BaseException) -> bool:
    """True also for a missing bucket: a HEAD does not tell them apart."""
    return isinstance(error, FileNotFoundError) and _code_of(str(error)) in (
        "",
        "NoSuchKey",
        "NoSuchUpload",
    )


def is_conflict(error: BaseException) -> bool:
    """Another client is writing the object. Its write may still fail."""
    return _code_of(str(error)) == "ConditionalRequestConflict"


def code_of_kept(error: BaseException) -> str:
    """Why the server did not remove one of the objects; empty: another fault."""
    match = _KEPT.search(str(error))
    return match[1] if match else ""


def fault_of(error: BaseException, *, operation: str, place: BucketPlace) -> TierError:
    text = str(error)
    status, code = status_of(error), _code_of(text)
    kind: type[TierError]
    if any(path in text for path in _METADATA_PATHS):
        kind, detail = TierDenied, _NO_CREDENTIALS
    elif isinstance(error, InvalidPathError):
        kind, detail = (
            TierError,
            (
                "cannot list objects of others whose names have empty segments; use a separate "
                "prefix"
            ),
        )
    elif code == "NoSuchBucket":
        kind, detail = TierUnavailable, "there is no such bucket; create it or correct the URL"
    elif code in _FULL or status == 507:
        kind, detail = TierFull, _answer(text, status, code)
    elif code in _ANOTHER_REGION or "configured region" in text:
        kind, detail = (
            TierUnavailable,
            (
                "the bucket is in another region: set the option region "
                f"({_answer(text, status, code)})"
            ),
        )
    elif code_of_kept(error):
        kind = TierDenied if code_of_kept(error) == "AccessDenied" else TierUnavailable
        detail = f"objects were not removed: {code_of_kept(error)}"
    elif status in (401, 403):
        kind, detail = TierDenied, f"wrong credentials or rights ({_answer(text, status, code)})"
    elif status is None:
        kind, detail = TierUnavailable, f"no answer: {_system(error, text)}"
    elif status >= 500 or status in (408, 429):
        kind, detail = TierUnavailable, _answer(text, status, code)
    else:
        kind, detail = TierError, _answer(text, status, code)
    return kind(place.tier, operation, f"{place}: {detail}")


def _code_of(text: str) -> str:
    match = _CODE.search(text)
    return match[1] if match else ""


def _answer(text: str, status: int | None, code: str) -> str:
    message = _MESSAGE.search(text)
    said = f": {message[1].strip()}" if message else ""
    return f"answer {status} {code}".rstrip() + said


def _system(error: BaseException, text: str) -> str:
    match = _SYSTEM.search(text)
    if match:
        return match[1]
    if "TimedOut" in text:
        return "timed out"
    return f"{type(error).__name__}: {text.partition(chr(10))[0].rpartition(' - ')[2][:200]}"
