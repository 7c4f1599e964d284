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
from tests.vllm.install import install_into
from tests.vllm.models import TINY, model_folder

from kvrouter_store._core import StoreServer


def python_with_torch() -> Path | None:
    """A Python that has torch: this one, which gets that of the engines' environment if need be."""
    named = Path(os.environ.get("KVROUTER_VLLM_PYTHON", ""))
    if find_spec("torch") is not None:
        return Path(sys.executable)
    if not named.is_file():
        return None
    script = "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path('purelib'))"
    found = subprocess.check_output([named, "-c", script], text=True).strip()
    version, _, folder = found.rpartition(" ")
    if version != str(sys.version_info[:2]):
        return None
    sys.path.append(folder)
    return named


TORCH_PYTHON = python_with_torch() or Path(sys.executable)
collect_ignore_glob = [] if find_spec("torch") is not None else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads that wait for one another turn a busy machine into a slow one."""
    import torch

    torch.set_num_threads(1)


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


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of a model with random weights, made once."""
    return model_folder(TINY, TORCH_PYTHON)


@pytest.fixture(scope="session")
def engine_command() -> list[str]:
    """The engine as a command, in the environment that has torch."""
    site = None if Path(sys.executable) == TORCH_PYTHON else install_into(TORCH_PYTHON)
    path = ["env", f"PYTHONPATH={site}"] if site is not None else []
    return [*path, str(TORCH_PYTHON), "-m", "kvrouter_store.torch_engine"]
