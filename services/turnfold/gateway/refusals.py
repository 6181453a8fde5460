"""Why a request gets no answer, independent of the protocol that it came in."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "invalid_request", "authentication", "permission", "not_found", "conflict", "too_large",
    "rate_limited", "unavailable", "bad_gateway", "internal",
]  # fmt: skip

STATUS: dict[Kind, int] = {
    "invalid_request": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "conflict": 409,
    "too_large": 413,
    "rate_limited": 429,
    "internal": 500,
    "bad_gateway": 502,
    "unavailable": 503,
}


class Refusal(Exception):
    """An answer that is an error; each protocol renders it as its own error object.

    `code` is for programs, `message` for people, `param` names the field at fault. Only what may
    succeed when tried again is `is_retriable`: SDKs resend 409, 429 and 5xx by themselves, and a
    turn limit that is resent is a turn limit reached again.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        is_retriable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.is_retriable = is_retriable
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return STATUS[self.kind]


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """The request itself is wrong; `param` names the field."""
    return Refusal("invalid_request", message, param=param, code=code)


class ContextLengthExceeded(Refusal):
    """No room for even one output token; worded as agents' frameworks expect it."""

    def __init__(self, num_prompt_tokens: int, limit: int) -> None:
        super().__init__(
            "invalid_request",
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {num_prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit
