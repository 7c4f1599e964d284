"""Runs shell scripts in fresh containers of the images that wheels are built and tried in."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

IMAGES = ("python:3.11-slim-bookworm", "python:3.13-slim-trixie")
"""For CPython 3.11, and for the wheels that serve 3.12 and every later version."""


def no_engine() -> str | None:
    """Why no container can be started here; None where one can."""
    command = shutil.which("docker")
    if command is None:
        return "no docker command"
    asked = subprocess.run([command, "info"], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return None
    return f"no Docker engine: {(asked.stderr.strip().splitlines() or ['it says nothing'])[0]}"


def run_in(
    image: str,
    script: str,
    *,
    mounts: Mapping[Path, str],
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a shell script prints in a container of the image, which is removed afterwards.

    The script runs as this user, in a home of its own, and ends at the first command that fails.
    `mounts` says where folders of this machine appear; a place may end with ":ro". Raises
    AssertionError, with the end of what was printed, if the script fails.
    """
    command = ["docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}"]
    command += [word for name, place in mounts.items() for word in ("-v", f"{name}:{place}")]
    for name, value in {"HOME": "/tmp", **(environment or {})}.items():
        command += ["-e", f"{name}={value}"]
    done = subprocess.run(
        [*command, "-w", "/tmp", image, "sh", "-ec", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
