"""Settings of the policy relay."""

from __future__ import annotations

from turnfold.gateway.backends.engine import EngineKind
from turnfold.log.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of the policy relay."""

    engines: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of the inference engines that get new weights."""
    engine_kind: EngineKind = "vllm"
    """vllm or sglang: which server the engines are; the embedded engine speaks as vLLM does."""
    engine_poll_s: float = 3.0
    """Seconds between looks at the engines' weight versions."""
    weight_update_timeout_s: float = 720.0
    """Longest wait for one engine to load new weights."""
