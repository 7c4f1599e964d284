"""Stands in for torchvision, which SGLang imports and which has no build for this torch on CPUs.

Every name is there and does nothing: no test here looks at images.
"""

from typing import Any


class Nothing:
    """Anything may be read of it, and it may be called."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *_: object, **__: object) -> Any:
        return Nothing()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()
