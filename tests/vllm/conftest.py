"""What the tests with real vLLM engines need; without the environment they are skipped."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.vllm.engines import free_port
from tests.vllm.install import install_into
from tests.vllm.services import Service, start_router, start_store

from kvrouter_store._core import StoreServer

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


@pytest.fixture
def store_url() -> Iterator[str]:
    """A store of 64 MiB in this process."""
    node = StoreServer(pool_bytes=64 << 20)
    node.start()
    yield f"kv://127.0.0.1:{node.port}"
    node.stop()


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write their logs."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def simulated(engine_folder: Path) -> Iterator[Service]:
    """A router before simulated engines, whose times are known."""
    with ExitStack() as cleanup:
        store = start_store(engine_folder, name="simulated-store")
        cleanup.callback(store.stop)
        engines = []
        for role in ("prefill", "decode"):
            port = free_port()
            command = [
                *(sys.executable, "-m", "kvrouter", "sim", "--role", role, "--port", port),
                *("--model", "tiny", "--block-size", "16", "--store", store.url),
                *("--time-to-first-token", "40ms", "--inter-token-latency", "10ms"),
            ]
            engine = Service.start(f"simulated-{role}", command, engine_folder)
            cleanup.callback(engine.stop)
            engine.wait_port(port)
            engines.append([f"127.0.0.1:{port}"])
        router = start_router(engine_folder, engines[0], engines[1], store.url)
        cleanup.callback(router.stop)
        yield router
