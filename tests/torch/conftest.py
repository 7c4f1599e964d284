"""Tests with real torch: where it is missing here, that of the engines' environment.

KVROUTER_VLLM_PYTHON names the python of that environment (tests/vllm/make_env.sh). Its packages are
added behind our own, so that all others stay those of the development environment. Without torch,
the tests of this folder are not collected.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvrouter_store._core import StoreServer


def add_engine_packages() -> None:
    """Make torch importable if the engines' environment has it for this version of Python."""
    named = os.environ.get("KVROUTER_VLLM_PYTHON")
    if find_spec("torch") is not None or not named or not Path(named).exists():
        return
    script = "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path('purelib'))"
    found = subprocess.check_output([named, "-c", script], text=True).strip()
    version, _, folder = found.rpartition(" ")
    if version == str(sys.version_info[:2]):
        sys.path.append(folder)


add_engine_packages()
collect_ignore_glob = [] if find_spec("torch") is not None else ["test_*.py"]


@pytest.fixture
def node() -> Iterator[StoreServer]:
    """A store of 64 MiB in this process."""
    node = StoreServer(pool_bytes=64 << 20)
    node.start()
    yield node
    node.stop()


@pytest.fixture
def url(node: StoreServer) -> str:
    return f"kv://127.0.0.1:{node.port}"
