"""vLLM over HTTP, token ids in and out; the embedded engine speaks the same.

The server needs `--enable-scale-out` (the generate route) and `--logprobs-mode processed_logprobs`
(logprobs of the distribution that was sampled from).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnfold.gateway.backends import vllm_wire
from turnfold.gateway.backends.engine import GenerateRequest, Generation
from turnfold.gateway.backends.replicas import ReplicatedEngines


class VllmEngines(ReplicatedEngines):
    """Replicas of one model behind vLLM servers or embedded engines.

    engines = VllmEngines(["http://10.0.0.1:8000"], vocab_size=151936, timeout_s=600)
    generation = await engines.generate(request)
    """

    def __init__(self, urls: Sequence[str], *, vocab_size: int, timeout_s: float) -> None:
        dialect = _VllmDialect(vocab_size)
        super().__init__(urls, dialect, vocab_size=vocab_size, timeout_s=timeout_s)


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _VllmDialect:
    generate_path = "/inference/v1/generate"
    abort_path = "/inference/v1/abort_requests"
    limits_path = "/v1/models"
    health_path = "/health"
    absent_hint = "start vLLM with --enable-scale-out, or set TURNFOLD_ENGINE_KIND to what it is"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def request_body(self, request: GenerateRequest, attempt: int, *, is_streamed: bool) -> bytes:
        return vllm_wire.request_body(request, is_streamed=is_streamed)

    def abort_bodies(self, request_id: str) -> Sequence[bytes]:
        # The id that aborts is the one of the response; the bare one is silently ignored.
        return [msgspec.json.encode({"request_ids": [f"generate-tokens-{request_id}"]})]

    def read(self, body: bytes) -> Generation:
        return vllm_wire.read_generation(body, self._vocab_size)

    def stream(self) -> vllm_wire.StreamedGeneration:
        return vllm_wire.StreamedGeneration(self._vocab_size)

    def max_context_tokens(self, body: bytes) -> int | None:
        models = msgspec.json.decode(body, type=_Models)
        return models.data[0].max_model_len if models.data else None
