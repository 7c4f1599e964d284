"""Whether a Python environment can run the demo's torch engines. A process of it answers that."""

import sys

from kvrouter.options.complaints import UsageError
from kvrouter.tools.demo.find_vllm import ask_python

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "aiohttp": "aiohttp",
    "kvrouter_store": "kvrouter-store",
}
"""The distribution of each package that the engine imports."""
PROBE = f"""
import json
from importlib.util import find_spec
print(json.dumps([name for name in {list(NEEDED)} if find_spec(name) is None]))
"""


def find_torch(python: str) -> str:
    """The Python whose torch is to be used; "" is the one that runs this.

    Raises UsageError, with the remedy, if it cannot run the demo's engines.
    """
    python = python or sys.executable
    missing = [NEEDED[name] for name in ask_python(python, PROBE, "--torch-python")]
    if missing:
        raise UsageError(
            f"{python} has no {' and no '.join(missing)}; run {python} -m pip install "
            "'kvrouter-store[torch-engine]', or name another Python with --torch-python"
        )
    return python
