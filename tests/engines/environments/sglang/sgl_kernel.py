"""Stands in for SGLang's GPU kernels: every name can be imported, none can be called.

Installed as `sgl_kernel` into the environment of the tests against a real SGLang on a CPU, where
attention and sampling run in PyTorch and no kernel is called.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.4.10"  # SGLang asks for at least this one


class AbsentKernel:
    """A kernel that is not there; calling it says so."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(f"{self.name} needs a GPU, and this environment is made for a CPU")

    def __getattr__(self, name: str) -> "AbsentKernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self.name}.{name}")


class AbsentSubmodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any submodule of this one, full of absent kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _kernels_of(module.__name__)  # type: ignore[method-assign]


def _kernels_of(module_name: str) -> Any:
    def kernel(name: str) -> AbsentKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{module_name}.{name}")

    return kernel


__path__: list[str] = []  # makes this module a package, so that it may have submodules
__getattr__ = _kernels_of(__name__)
sys.meta_path.append(AbsentSubmodules())
