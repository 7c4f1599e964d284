"""SGLang in processes of its own environment; without the environment, all is skipped."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.store import StoreProcess
from tests.sglang.engine import Engines
from tests.sglang.engines import STUBS, SglangOptions, StartEngine
from tests.vllm.engines import Engine
from tests.vllm.install import install_into
from tests.vllm.models import TINY, model_folder

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
def site(sglang_python: Path) -> Path | None:
    """The project in the environment: see `install_into`."""
    return install_into(sglang_python)


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write their logs."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def start_engine(sglang_python: Path, site: Path | None, engine_folder: Path) -> StartEngine:
    """Starts whole engines by name and options; they belong to who calls."""
    model = model_folder(TINY, sglang_python)

    def start(name: str, environment: dict[str, str] | None = None, **options: Any) -> Engine:
        given = {"OMP_NUM_THREADS": "1", **(environment or {})}
        paths = [STUBS, site, given.pop("PYTHONPATH", None)]
        given["PYTHONPATH"] = ":".join(str(path) for path in paths if path)
        chosen = SglangOptions(name, model, environment=given, **options)
        return Engine.start(sglang_python, chosen, engine_folder, None)

    return start


@pytest.fixture(scope="session")
def pair(
    sglang_python: Path, site: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engines, Engines]]:
    """Two processes that have imported SGLang."""
    folder = tmp_path_factory.mktemp("sglang")
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
