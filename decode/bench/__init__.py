"""Measuring: prompt suites, the benchmark, costs and predictions, statistics, reports."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Importing this package binds it to ``decode.bench``, which is a function of the Python API as well."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("decode.commands.bench").bench(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
