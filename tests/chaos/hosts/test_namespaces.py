"""What runs in namespaces of its own ends with what started it."""

import subprocess
import sys

import pytest
from tests.chaos.hosts.namespaces import NoHosts, own_namespaces

START = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def test_what_runs_inside_is_killed_with_what_started_it() -> None:
    try:
        own = own_namespaces()
    except NoHosts as reason:
        pytest.skip(f"{reason}: run as root on Linux")
    inside = (*own, "sh", "-c", "echo here && sleep infinity")
    outside = subprocess.Popen(
        (sys.executable, "-c", START, *inside), stdout=subprocess.PIPE, text=True
    )
    with outside:
        assert outside.stdout is not None
        assert outside.stdout.readline() == "here\n"
        outside.kill()
        assert outside.stdout.read() == ""  # once all of them have ended
