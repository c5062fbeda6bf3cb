"""The proxy's own refusals, in the form of the called API."""

import msgspec

from kvhold.core.errors import KVHoldError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ProxyRefusal(KVHoldError):
    """reason:        a label in metrics
    retry_after_s: None: trying again does not help
    """

    def __init__(
        self,
        status: int,
        reason: str,
        detail: str,
        *,
        retry_after_s: float | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.field = field

    def body(self, path: str) -> bytes:
        return error_body(path, self.status, str(self), self.field)


def error_body(path: str, status: int, message: str, field: str | None = None) -> bytes:
    """The form is OpenAI's or, below /v1/messages, Anthropic's."""
    kind = _TYPES.get(status, "api_error")
    if path.startswith("/v1/messages"):
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": field, "code": status}}
    )


def error_event(path: str, message: str) -> bytes:
    """It ends a stream whose engine has failed."""
    prefix = b"event: error\n" if path.startswith("/v1/messages") else b""
    return prefix + b"data: " + error_body(path, 502, message) + b"\n\n"
