"""SGLang's cache in processes of its own environment; without the environment, all is skipped."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess
from tests.sglang.engine import Engines
from tests.vllm.install import install_into

HOW = "set KVROUTER_SGLANG_PYTHON to the python that tests/sglang/make_env.sh prints"


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The python of the environment, with the store of this checkout in it."""
    named = os.environ.get("KVROUTER_SGLANG_PYTHON")
    if not named:
        pytest.skip(f"no SGLang environment: {HOW}")
    python = Path(named)
    if not python.exists():
        pytest.skip(f"KVROUTER_SGLANG_PYTHON names no file ({python}): {HOW}")
    return python


@pytest.fixture(scope="session")
def pair(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engines, Engines]]:
    """Two processes that have imported SGLang."""
    site, folder = install_into(sglang_python), tmp_path_factory.mktemp("sglang")
    with (
        Engines(sglang_python, site, folder / "one.log") as one,
        Engines(sglang_python, site, folder / "other.log") as other,
    ):
        yield one, other


@pytest.fixture
def engines(pair: tuple[Engines, Engines]) -> Iterator[tuple[Engines, Engines]]:
    """The two processes, without engines before and after the test."""
    yield pair
    for each in pair:
        each.close_all()


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    """Starts store nodes, ended after the test."""
    started: list[StoreProcess] = []

    def start(memory: str = "64MiB", *flags: str) -> StoreProcess:
        folder = tmp_path / f"store-{len(started)}"
        folder.mkdir()
        started.append(StoreProcess(folder, memory, *flags))
        return started[-1].start()

    yield start
    for each in started:
        each.kill()
