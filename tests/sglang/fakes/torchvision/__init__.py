"""Stands for torchvision, whose CPU wheels need another torch: classes that can be named and subclassed, nothing that works."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

__version__ = "0.28.0"


class _Named(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
