"""The sdist and the wheel, built once and tested where the source tree cannot help them."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging
ROOT = Path(__file__).resolve().parent.parent
ENGINE_IMPORTS = """
import sys
import kvrouter_store, kvrouter_store._core
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.vllm import settings as vllm_settings
foreign = sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
print(" ".join(name for name in foreign if not name.startswith("_")))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(dist: Path) -> Path:
    """The sdist, unpacked outside the tree."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(dist, filter="data")
    return dist / archive.name.removesuffix(".tar.gz")


def environment(folder: Path, wheel: Path) -> Path:
    """A fresh virtual environment with the wheel and nothing else; returns its python."""
    venv.create(folder, with_pip=True, system_site_packages=False)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=folder)
    return python


def show_this_ones_packages(folder: Path) -> None:
    """Let the environment in `folder` import what this one has, behind what it has itself.

    To be called after its installs: pip counts what it sees there as installed.
    """
    site = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    (target,) = folder.glob("lib/python3*/site-packages")
    (target / "development.pth").write_text(f"{site}\n")


def test_the_wheel_holds_both_packages_their_native_modules_and_stubs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for stem in ("kvrouter_store/_core", "kvrouter/_native"):
        assert any(name.startswith(stem) and name.endswith(".so") for name in names), stem
        assert f"{stem}.pyi" in names
    page = files("kvrouter.control.page") / "static"
    for each in page.iterdir():
        assert f"kvrouter/control/page/static/{each.name}" in names
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith("-info")}
    assert {top for top in tops if ".dist-info" not in top} == {
        "kvrouter",
        "kvrouter_store",
        "kvstore",
    }


def test_the_sdist_carries_its_tests_and_docs(unpacked: Path) -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CMakeLists.txt", "csrc", "tests", "deploy"):
        assert (unpacked / name).exists(), name
    assert not (unpacked / "build").exists()


def test_an_engine_needs_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """What a connector imports is the standard library and the wheel: no dependency is needed."""
    python = environment(tmp_path / "engine", wheel)
    assert run(python, "-c", ENGINE_IMPORTS, cwd=tmp_path).split() == ["kvrouter_store"]


def test_the_wheel_passes_the_tests_of_the_sdist(
    wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    python = environment(tmp_path / "user", wheel)
    show_this_ones_packages(tmp_path / "user")
    where = run(python, "-c", "import kvrouter; print(kvrouter.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where
    for source in ("router", "store"):
        assert (unpacked / source).is_dir()
    # All of them have passed in the tree; these use every package and both native modules.
    chosen = [
        "tests/unit/store/client/test_blocking.py",
        "tests/unit/store/client/test_transport_contract.py",
        "tests/unit/store/node/test_node.py",
        "tests/integration/router",
        "tests/unit/router/native",
        "tests/tools/sim",
    ]
    run(python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", *chosen, cwd=unpacked)
