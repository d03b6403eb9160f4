"""Stands for SGLang's compiled kernels, of which there is no build for CPUs on PyPI: every attribute raises when it is called.

With it SGLang imports and runs its plain torch paths. ``scalar_type`` and ``utils`` stay absent: SGLang probes for them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

__version__ = "0.0.0"
ABSENT = ("sgl_kernel.scalar_type", "sgl_kernel.utils")


def _raises(name: str):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not built here")

    return kernel


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _raises(name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("sgl_kernel.") and name not in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
