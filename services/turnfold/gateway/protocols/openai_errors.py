"""OpenAI's error object, the same in all of its APIs."""

from __future__ import annotations

from typing import Any

from turnfold.gateway.refusals import Kind, Refusal

_TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "invalid_request_error",
    "conflict": "invalid_request_error",
    "too_large": "invalid_request_error",
    "rate_limited": "rate_limit_error",
    "bad_gateway": "server_error",
    "unavailable": "server_error",
    "internal": "server_error",
}


def error_object(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """What stands under `error`, with the request id that the log knows it by."""
    return {
        "message": refusal.message,
        "type": _TYPES[refusal.kind],
        "param": refusal.param,
        "code": refusal.code,
        "request_id": request_id,
    }
