"""The kinds of servers that can be behind the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from turnfold.gateway.backends.engine import EngineKind
from turnfold.gateway.backends.replicas import ReplicatedEngines
from turnfold.gateway.backends.sglang import SglangEngines
from turnfold.gateway.backends.sglang_weights import SglangWeights
from turnfold.gateway.backends.vllm import VllmEngines
from turnfold.gateway.backends.vllm_weights import VllmWeights
from turnfold.gateway.backends.weights import EngineWeights


def engines_of(
    kind: EngineKind, urls: Sequence[str], *, vocab_size: int, timeout_s: float
) -> ReplicatedEngines:
    """The replicas at these URLs, to sample from."""
    match kind:
        case "vllm":
            return VllmEngines(urls, vocab_size=vocab_size, timeout_s=timeout_s)
        case "sglang":
            return SglangEngines(urls, vocab_size=vocab_size, timeout_s=timeout_s)
        case _:
            assert_never(kind)


def weights_of(kind: EngineKind, url: str, *, timeout_s: float) -> EngineWeights:
    """The weights of the engine at this URL, to replace."""
    match kind:
        case "vllm":
            return VllmWeights(url, timeout_s=timeout_s)
        case "sglang":
            return SglangWeights(url, timeout_s=timeout_s)
        case _:
            assert_never(kind)
