"""What the tests with LMCache need; without its environment they are skipped."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.lmcache.process import AdapterProcess
from tests.lmcache.server import own_environment
from tests.vllm.install import install_into
from tests.vllm.services import Service, start_store

HOW = "set KVROUTER_LMCACHE_PYTHON to the python that tests/lmcache/make_env.sh prints"
INSIDE = Path(__file__).parent / "inside" / "adapter.py"


@pytest.fixture(scope="session")
def lmcache_python() -> Path:
    """The python of LMCache's environment, with the store of this checkout in it."""
    named = os.environ.get("KVROUTER_LMCACHE_PYTHON")
    if not named:
        pytest.skip(f"no LMCache environment: {HOW}")
    python = Path(named)
    if not python.exists():
        pytest.skip(f"KVROUTER_LMCACHE_PYTHON names no file ({python}): {HOW}")
    install_into(python)
    return python


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """See `own_environment`."""
    return own_environment()


@pytest.fixture(scope="session")
def imported(
    lmcache_python: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The socket of a process that has imported LMCache, and forks for every connection."""
    path = str(tmp_path_factory.mktemp("lmcache") / "socket")
    process = subprocess.Popen(
        [lmcache_python, INSIDE, path],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert "listening\n" in process.stdout
        yield path
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and whatever it forked
        process.communicate()


@pytest.fixture
def start(imported: str) -> Iterator[Callable[..., AdapterProcess]]:
    """Starts processes with an adapter each, by LMCache's own loader: start(**adapter_params)."""
    with ExitStack() as processes:

        def begin(**params: Any) -> AdapterProcess:
            return processes.enter_context(AdapterProcess(imported, params))

        yield begin


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Service]:
    """`kvrouter store` in a process of its own, with a pool of 16 MiB."""
    service = start_store(tmp_path, memory="16MiB")
    yield service
    service.stop()
