"""Connectors that run inside engines."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def once_asked(package: str, module: str, name: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose class `name` is in a module that needs the engine."""

    def get(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {package!r} has no attribute {asked!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return get
