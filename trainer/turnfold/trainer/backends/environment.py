"""The process environment that verl reads when it is imported: set here, once, before that."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Literal

from turnfold.schemas.settings import SettingsError

CPU = {
    "VERL_USE_EXTERNAL_MODULES": "turnfold.trainer.cpu_platform",
    "VERL_PLATFORM": "cpu",
}
_QUIET = {"VERL_LOGGING_LEVEL": "WARN", "TOKENIZERS_PARALLELISM": "false"}
ALWAYS = _QUIET | {
    # A process of its own, unless torchrun has said otherwise.
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def num_processes() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_rank() -> int:
    """Place of this process among them."""
    return int(os.environ.get("RANK", "0"))


def for_workers(is_gpu: bool) -> dict[str, str]:
    """What verl needs in the environment of a process that another one starts."""
    shared = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    return shared | _QUIET | ({} if is_gpu else CPU)


def prepare(device: Literal["auto", "cpu", "cuda"], *, is_elsewhere: bool = False) -> bool:
    """Set what verl needs and return whether it will train on a GPU.

    With `is_elsewhere` that GPU need not be in this machine, and auto is a GPU only if one is here.
    Raises SettingsError when a GPU is asked for and torch sees none, or when verl was imported
    before with another platform.
    """
    import torch

    is_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    has_gpu = torch.cuda.is_available()
    if is_gpu and not has_gpu and not is_elsewhere:
        raise SettingsError("TURNFOLD_DEVICE=cuda, but torch sees no GPU: use cpu or auto")
    wanted = CPU if not (is_gpu and has_gpu) else {}
    if "verl" in sys.modules and any(os.environ.get(k) != v for k, v in wanted.items()):
        raise SettingsError("verl was imported before its platform was chosen")
    os.environ.update(wanted)
    for name, value in ALWAYS.items():
        os.environ.setdefault(name, value)
    # verl tries every engine that it knows, and says so for each that is not installed.
    warnings.filterwarnings("ignore", message=r"\w+ engine is not available")
    return is_gpu


def join_process_group(is_gpu: bool) -> None:
    """Join torch's process group, unless this process is in one already.

    verl would make its own; on a CPU it asks for "cpu:gloo,cpu:gloo", which torch refuses, but it
    leaves an existing group alone. One process needs no port to meet the others.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if is_gpu:
        # torchrun's processes see all GPUs of the machine, a Ray worker sees its own alone.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    if int(os.environ["WORLD_SIZE"]) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
