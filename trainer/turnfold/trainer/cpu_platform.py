"""A CPU platform for verl, through verl's own extension point.

verl ships platforms for accelerators only. It imports this module because VERL_USE_EXTERNAL_MODULES
names it (see `backends.environment`), and takes the platform because VERL_PLATFORM does.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> types.ModuleType:
    """torch.cpu with the memory functions of torch.cuda, which verl calls without asking."""
    module = types.ModuleType("turnfold_cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    functions: dict[str, Any] = {
        **dict.fromkeys(_MEMORY_SIZES, lambda *_, **__: 0),
        **dict.fromkeys(_WITHOUT_EFFECT, lambda *_, **__: None),
        "mem_get_info": lambda *_, **__: (0, 0),
        "is_available": lambda: False,  # there is no cache to empty
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "get_device_name": lambda *_, **__: "cpu",
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


_MEMORY_SIZES = (
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
)
_WITHOUT_EFFECT = (
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "synchronize",
    "set_device",
    "manual_seed",
    "manual_seed_all",
)
_CPU = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """verl's questions about a device, answered for a machine without an accelerator."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "generic"

    @property
    def device_module(self) -> types.ModuleType:
        return _CPU

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl passes the answer to `.to(...)`, where a number would mean a GPU.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": 1}

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
