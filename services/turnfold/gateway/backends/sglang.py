"""SGLang over HTTP, token ids in and out.

The server should run with `--incremental-streaming-output`: without it each chunk of a stream
repeats the whole output so far, which takes time and bytes quadratic in the length of a reply.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnfold.gateway.backends import sglang_wire
from turnfold.gateway.backends.engine import GenerateRequest, Generation
from turnfold.gateway.backends.replicas import ReplicatedEngines


class SglangEngines(ReplicatedEngines):
    """Replicas of one model behind SGLang servers.

    engines = SglangEngines(["http://10.0.0.1:30000"], vocab_size=151936, timeout_s=600)
    generation = await engines.generate(request)
    """

    def __init__(self, urls: Sequence[str], *, vocab_size: int, timeout_s: float) -> None:
        dialect = _SglangDialect(vocab_size)
        super().__init__(urls, dialect, vocab_size=vocab_size, timeout_s=timeout_s)


class _ServerInfo(msgspec.Struct):
    max_req_input_len: int | None = None


class _SglangDialect:
    generate_path = "/generate"
    abort_path = "/abort_request"
    limits_path = "/server_info"
    # /health samples a token, so it fails while an update of the weights has paused the server.
    health_path = "/model_info"
    absent_hint = "TURNFOLD_ENGINE_KIND=sglang is for SGLang servers"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def request_body(self, request: GenerateRequest, attempt: int, *, is_streamed: bool) -> bytes:
        rid = _rids(request.request_id)[attempt]
        return sglang_wire.request_body(request, rid, is_streamed=is_streamed)

    def abort_bodies(self, request_id: str) -> Sequence[bytes]:
        return [msgspec.json.encode({"rid": rid}) for rid in _rids(request_id)]

    def read(self, body: bytes) -> Generation:
        return sglang_wire.read_generation(body, self._vocab_size)

    def stream(self) -> sglang_wire.StreamedGeneration:
        return sglang_wire.StreamedGeneration(self._vocab_size)

    def max_context_tokens(self, body: bytes) -> int | None:
        """A few tokens less than the context, and less again when the KV cache is smaller."""
        return msgspec.json.decode(body, type=_ServerInfo).max_req_input_len


def _rids(request_id: str) -> tuple[str, str]:
    """An id for each try: SGLang refuses one that it is still at work on.

    It aborts every request whose id begins with the one it is given, so ids of one length are needed
    to tell two requests apart; those of turns are.
    """
    return request_id, f"{request_id}-again"
