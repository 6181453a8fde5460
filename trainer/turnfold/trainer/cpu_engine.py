"""verl's FSDP2 engine for a machine without an accelerator, through verl's own registry.

The one difference: verl keeps the parameters of a forward-only (reference) policy in pinned memory
of the CPU, to save memory of the GPU. Here they are there anyway, and there is no GPU to pin for.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead


@EngineRegistry.register("language_model", backend="fsdp2", device="cpu")
class CpuEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """FSDP2 on a CPU, for policies in training and for reference policies."""

    def _build_fsdp_module(self, module: Any) -> Any:
        is_forward_only = self.engine_config.forward_only
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = is_forward_only
