"""The API's errors: `application/problem+json` (RFC 9457)."""

from http import HTTPStatus

from kvhold.core.errors import KVHoldError


class ControlRefusal(KVHoldError):
    """reason: one word for programs"""

    def __init__(self, status: HTTPStatus, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason

    def problem(self) -> dict[str, object]:
        return {
            "title": self.status.phrase,
            "status": int(self.status),
            "reason": self.reason,
            "detail": str(self),
        }
