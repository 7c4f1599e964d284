"""Part of the stand-in for torchvision."""

from torchvision import __getattr__  # noqa: F401
