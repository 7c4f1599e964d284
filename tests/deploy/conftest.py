"""A Docker engine for the tests of deploy/, or the reason why there is none."""

import shutil
import subprocess

import pytest


@pytest.fixture(scope="session")
def docker() -> str:
    """The docker command, where an engine with compose answers it."""
    command = shutil.which("docker")
    if command is None:
        pytest.skip("no docker command; .ci/stages/containers.sh brings an engine")
    for question in (["info"], ["compose", "version"]):
        asked = subprocess.run([command, *question], capture_output=True, text=True, check=False)
        if asked.returncode:
            said = (asked.stderr.strip().splitlines() or ["it says nothing"])[0]
            pytest.skip(f"no Docker engine with compose ({said}); see .ci/stages/containers.sh")
    return command
