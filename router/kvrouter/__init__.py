"""The OpenAI-compatible router between clients and prefill and decode engines."""

from importlib.metadata import version
from typing import Final

__version__: Final = version("kvrouter")
