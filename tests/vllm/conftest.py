"""What the tests with real vLLM engines need; without the environment they are skipped."""

import os
from pathlib import Path

import pytest
from tests.vllm.install import install_into

HOW = "set KVROUTER_VLLM_PYTHON to the python that tests/vllm/make_env.sh prints"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The python of the vLLM environment."""
    named = os.environ.get("KVROUTER_VLLM_PYTHON")
    if not named:
        pytest.skip(f"no vLLM environment: {HOW}")
    python = Path(named)
    if not python.exists():
        pytest.skip(f"KVROUTER_VLLM_PYTHON names no file ({python}): {HOW}")
    return python


@pytest.fixture(scope="session")
def site(vllm_python: Path) -> Path | None:
    """The project in the vLLM environment: see `install_into`."""
    return install_into(vllm_python)


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write their logs."""
    return tmp_path_factory.mktemp("engines")
