"""Error answers: what a client is told of an exception, in the form of its protocol."""

from __future__ import annotations

import logging
import math
import traceback

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from turnfold.gateway import metrics
from turnfold.gateway.client import EventTooLarge, LogUnavailable, UnknownRollout
from turnfold.gateway.keys import KeyRefused
from turnfold.gateway.refusals import Refusal

log = logging.getLogger(__name__)


def refusal_of(error: Exception, request_id: str) -> Refusal:
    """What the client is told. What we did not expect is logged, without its text: that may quote
    messages of the agent."""
    match error:
        case Refusal():
            return error
        case KeyRefused():
            return Refusal("authentication", str(error), code="invalid_api_key")
        case UnknownRollout():
            return Refusal("not_found", str(error), code="unknown_rollout")
        case LogUnavailable():
            return Refusal(
                "unavailable", f"{error}: try again", code="log_unavailable", is_retriable=True
            )
        case EventTooLarge():
            return Refusal("too_large", str(error), code="event_too_large")
        case ClientDisconnect():
            return Refusal("invalid_request", "the client left before its request was read")
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed: %s\n%s", request_id, type(error).__name__, where)
    return Refusal(
        "internal", f"the gateway failed; its log knows this as {request_id}", code="internal_error"
    )


def request_id_headers(request_id: str) -> dict[str, str]:
    """The id under the names that OpenAI's and Anthropic's SDKs look for."""
    return {"x-request-id": request_id, "request-id": request_id}


def error_response(body: bytes, refusal: Refusal, request_id: str) -> Response:
    metrics.REFUSED.labels(str(refusal.status), refusal.code or "").inc()
    headers = {
        **request_id_headers(request_id),
        "x-should-retry": "true" if refusal.is_retriable else "false",
    }
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    return Response(body, refusal.status, headers, media_type="application/json")
