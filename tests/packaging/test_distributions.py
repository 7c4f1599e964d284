"""The distributions, tested where the source tree cannot help them."""

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
from tests.packaging.containers import no_engine

import kvrouter

pytestmark = pytest.mark.packaging
ROOT = Path(__file__).resolve().parents[2]
ENGINE_IMPORTS = """
import sys
import kvrouter_store, kvrouter_store._core
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors import settings as connector_settings
foreign = sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
print(" ".join(name for name in foreign if not name.startswith("_")))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def wheels(dist: Path, name: str) -> list[Path]:
    """The wheels of one distribution, for every Python that they were built for."""
    found = sorted(dist.glob(f"{name}-*.whl"))
    assert found
    return found


def names(wheel: Path) -> set[str]:
    """The files in a wheel but for its metadata."""
    return {each for each in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in each}


def newest_glibc(tag: str, processor: str) -> int:
    """The minor version of the newest glibc among the platforms of a wheel; 0 without any."""
    found = re.findall(rf"manylinux_2_(\d+)_{processor}\b", tag)
    return max(map(int, found), default=0)


def required(wheel: Path) -> list[str]:
    """What a wheel depends on without any extra."""
    archive = zipfile.ZipFile(wheel)
    (path,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    found = re.findall(r"^Requires-Dist: (.+)$", archive.read(path).decode(), re.MULTILINE)
    return [requirement for requirement in found if "extra ==" not in requirement]


def unpacked(dist: Path, name: str, folder: Path) -> Path:
    """A source distribution, unpacked."""
    (archive,) = dist.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def environment(folder: Path, dist: Path, *packages: str) -> Path:
    """A fresh virtual environment with packages of `dist` and nothing else; returns its python."""
    venv.create(folder, with_pip=True, system_site_packages=False)
    python = folder / "bin" / "python"
    source = ("--no-index", "--find-links", dist)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", *source, *packages, cwd=folder)
    return python


def show_this_ones_packages(folder: Path) -> None:
    """Let the environment in `folder` import what this one has, behind what it has itself.

    To be called after its installs: pip counts what it sees there as installed.
    """
    site = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    (target,) = folder.glob("lib/python3*/site-packages")
    (target / "development.pth").write_text(f"{site}\n")


def test_a_wheel_holds_its_packages_their_native_module_stub_and_licence(dist: Path) -> None:
    for name, packages, native in (
        ("kvrouter_store", {"kvrouter_store", "kvstore"}, "kvrouter_store/_core"),
        ("kvrouter", {"kvrouter"}, "kvrouter/_native"),
    ):
        for wheel in wheels(dist, name):
            held = names(wheel)
            assert {each.split("/")[0] for each in held} == packages
            assert any(re.fullmatch(rf"{native}\.\S+\.so", each) for each in held)
            assert {f"{native}.pyi", f"{name}/py.typed"} <= held
            assert any(
                each.endswith("licenses/LICENSE") for each in zipfile.ZipFile(wheel).namelist()
            )


def test_the_status_page_is_in_the_wheel(dist: Path) -> None:
    page = files("kvrouter.control.page") / "static"
    for wheel in wheels(dist, "kvrouter"):
        assert {f"kvrouter/control/page/static/{each.name}" for each in page.iterdir()} <= names(
            wheel
        )


def test_the_store_needs_nothing_and_the_router_the_store_of_its_version(dist: Path) -> None:
    for wheel in wheels(dist, "kvrouter_store"):
        assert required(wheel) == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wheel in wheels(dist, "kvrouter"):
        assert f"kvrouter-store=={kvrouter.__version__}" in required(wheel)
        assert len(required(wheel)) == len(project["dependencies"]) + 1


def test_there_is_a_wheel_for_3_11_and_one_for_every_later_python(dist: Path) -> None:
    if reason := no_engine():
        pytest.skip(f"{reason}: run with .ci/stages/packaging.sh as root")
    for name in ("kvrouter_store", "kvrouter"):
        tags = {wheel.stem.split("-", 2)[2] for wheel in wheels(dist, name)}
        assert {tag.rsplit("-", 1)[0] for tag in tags} == {"cp311-cp311", "cp312-abi3"}
        assert all(0 < newest_glibc(tag, "x86_64") <= 28 for tag in tags)


def test_the_sdist_carries_its_tests_and_docs(dist: Path, tmp_path: Path) -> None:
    folder = unpacked(dist, "kvrouter", tmp_path)
    for name in ("README.md", "ARCHITECTURE.md", "LICENSE", "csrc", "tests", "deploy", "store"):
        assert (folder / name).exists(), name
    assert not (folder / "build").exists()


def test_the_sdist_of_the_store_stands_alone(dist: Path, tmp_path: Path) -> None:
    folder = unpacked(dist, "kvrouter_store", tmp_path)
    parts = "LICENSE", "CMakeLists.txt", "csrc/base", "kvrouter_store", "kvstore"
    for name in (*parts, "kvrouter_store/torch_engine"):
        assert (folder / name).exists(), name
    assert not [path for path in folder.rglob("*") if path.is_symlink()]


def test_an_engine_needs_the_wheel_of_the_store_alone(dist: Path, tmp_path: Path) -> None:
    """What a connector imports is the standard library and the wheel: no dependency is needed."""
    python = environment(tmp_path / "engine", dist, "kvrouter-store")
    assert run(python, "-c", ENGINE_IMPORTS, cwd=tmp_path).split() == ["kvrouter_store"]


def test_the_wheels_use_the_processor_as_a_build_from_source_does(
    dist: Path, tmp_path: Path
) -> None:
    """zig's runtime denies every extension of a processor; csrc/base/processor.h asks elsewhere."""
    python = environment(tmp_path / "engine", dist, "kvrouter-store")
    script = "from kvrouter_store import _core; print(_core.crc32c_backend())"
    here = run(sys.executable, "-c", script, cwd=tmp_path)
    assert run(python, "-c", script, cwd=tmp_path) == here


ROUTER_TESTS = (
    *("control", "foreign_stores", "kubernetes", "node_events", "observability", "prefill_queue"),
    *("reload", "rendered", "request_path", "serve", "several_nodes", "status_command", "traces"),
)


def test_the_wheels_pass_the_tests_of_the_sdist(dist: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "user", dist, "kvrouter-store", "kvrouter")
    show_this_ones_packages(tmp_path / "user")
    tests = unpacked(dist, "kvrouter", tmp_path)
    where = "import kvrouter, kvrouter_store; print(kvrouter.__file__, kvrouter_store.__file__)"
    assert run(python, "-c", where, cwd=tmp_path).count(str(tmp_path)) == 2
    # All of them have passed in the tree; these use every package and both native modules.
    chosen = [
        "tests/unit/store/client/test_blocking.py",
        "tests/unit/store/client/test_transport_contract.py",
        "tests/unit/store/node/test_node.py",
        *(f"tests/integration/router/test_{name}.py" for name in ROUTER_TESTS),
        "tests/unit/router/native",
        "tests/tools/sim",
    ]
    run(python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", *chosen, cwd=tests)
