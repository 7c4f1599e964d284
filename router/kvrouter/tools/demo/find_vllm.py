"""Whether an environment can run the demo's vLLM engines; it is asked, nothing is imported."""

import subprocess
import sys
from dataclasses import dataclass

import orjson

from kvrouter.options.complaints import UsageError
from kvrouter.tools.demo.settings import child_environment
from kvrouter_store.connectors.vllm.versions import VERSIONS, facts_of

__all__ = ["VllmFound", "find_vllm"]

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
    """A python that has vLLM of a tested series, and our connector."""

    python: str
    version: str


def find_vllm(python: str) -> VllmFound:
    """Ask a python, the one that runs this where it is "", for vLLM.

    Raises UsageError, with the remedy, where it cannot run the demo's engines.
    """
    python = python or sys.executable
    version, connector = _asked(python)
    tested = " or ".join(facts.series for facts in VERSIONS)
    if version is None:
        raise UsageError(
            f"vLLM is not installed for {python}; install a CPU build of vLLM {tested} there, or "
            "name the python of an environment that has one with --vllm-python"
        )
    if facts_of(version) is None:
        raise UsageError(
            f"{python} has vLLM {version}, with which the connector was not tested; install a CPU "
            f"build of vLLM {tested}"
        )
    if not connector:
        raise UsageError(
            f"{python} has vLLM but not kvrouter, whose connector the engines load; run "
            f"{python} -m pip install --no-deps kvrouter"
        )
    return VllmFound(python, version)


def _asked(python: str) -> tuple[str | None, bool]:
    """The version of vLLM, None where there is none, and whether kvstore is there."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env=child_environment(),
            cwd="/",
            check=True,
        )
        version, connector = orjson.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"{python} is no python that runs ({error}); name one with --vllm-python"
        ) from None
    return version, connector
