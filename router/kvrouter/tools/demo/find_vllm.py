"""Whether a Python environment can run the demo's vLLM engines. A process of it answers that."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import orjson

from kvrouter.options.complaints import UsageError
from kvrouter.tools.demo.settings import child_environment
from kvrouter_store.connectors.vllm.versions import VERSIONS, facts_of

PROBE_S = 60.0
PROBE = """
import json
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
named = packages_distributions().get("vllm") if find_spec("vllm") else None
print(json.dumps([version(named[0]) if named else None, find_spec("kvrouter_store") is not None]))
"""


@dataclass(frozen=True)
class VllmFound:
    """A Python with a tested version of vLLM and kvrouter's connector."""

    python: str
    version: str


def find_vllm(python: str) -> VllmFound:
    """The vLLM of `python`; "" is the Python that runs this.

    Raises UsageError, with the remedy, if it cannot run the demo's engines.
    """
    python = python or sys.executable
    version, connector = _probe(python)
    tested = " or ".join(each.series for each in VERSIONS)
    if version is None:
        raise UsageError(
            f"vLLM is not installed for {python}; install a CPU build of vLLM {tested} there, or "
            "name the Python of an environment that has one with --vllm-python"
        )
    facts = facts_of(version)
    if facts is None or facts.ran == "nothing":
        raise UsageError(
            f"{python} has vLLM {version}, with which the connector was not tested; install a CPU "
            f"build of vLLM {tested}"
        )
    if not connector:
        raise UsageError(
            f"{python} has vLLM but not kvrouter-store, which holds their connector; run "
            f"{python} -m pip install kvrouter-store"
        )
    return VllmFound(python, version)


def _probe(python: str) -> tuple[str | None, bool]:
    """The version of vLLM, or None, and whether the connector is there."""
    version, connector = ask_python(python, PROBE, "--vllm-python")
    return version, connector


def ask_python(python: str, script: str, flag: str) -> Any:
    """The JSON that a script prints in an environment. UsageError, naming the flag: it cannot."""
    try:
        output = subprocess.check_output(
            [python, "-c", script],
            stderr=subprocess.DEVNULL,
            timeout=PROBE_S,
            env=child_environment(),
            cwd="/",
        )
        return orjson.loads(output)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"{python} cannot be run as Python ({error}); name one with {flag}"
        ) from None
