"""The aarch64 wheels on an aarch64 Python, under QEMU: what works on one processor alone fails."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility import client
from tests.packaging.build import build
from tests.packaging.test_distributions import newest_glibc

pytestmark = [pytest.mark.aarch64, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
CLIENT = Path(client.__file__)
SUITE = "bookworm" if sys.version_info[:2] == (3, 11) else "trixie"  # whose Python loads the wheels
PATIENCE_S = 300


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those of both distributions; KVROUTER_AARCH64_WHEELS names a folder to keep them in."""
    named = os.environ.get("KVROUTER_AARCH64_WHEELS")
    folder = Path(named) if named else tmp_path_factory.mktemp("wheels")
    build(folder, processor="aarch64")
    return sorted(folder.glob("*.whl"))


class Machine:
    """An aarch64 Python that imports the wheels and nothing else."""

    def __init__(self, packages: Path) -> None:
        command = [str(HERE / "make_machine.sh"), SUITE]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        self._python = made.stdout.strip()
        self._environment = {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._python, *map(str, arguments)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str | Path) -> Any:
        """What a script printed, as JSON."""
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        return json.loads(said)


@pytest.fixture(scope="session")
def machine(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Machine:
    packages = tmp_path_factory.mktemp("packages")
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(packages)
    return Machine(packages)


def here(*arguments: str | Path) -> Any:
    """What a script printed on this machine's Python, as JSON."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_wheels_say_for_which_platform_they_are(wheels: list[Path]) -> None:
    python = "cp311-cp311" if SUITE == "bookworm" else "cp312-abi3"
    module = "cpython-311-aarch64-linux-gnu.so" if SUITE == "bookworm" else "abi3.so"
    assert {each.name.split("-")[0] for each in wheels} == {"kvrouter", "kvrouter_store"}
    for wheel in wheels:
        assert f"-{python}-" in wheel.name
        assert 0 < newest_glibc(wheel.name, "aarch64") <= 28
        native = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
        assert [name.partition(".")[2] for name in native] == [module]


def test_digests_hashes_and_scans_are_those_of_this_processor(machine: Machine) -> None:
    found = machine.run(HERE / "facts.py")
    assert found["crc32c"][:2] == [0xE3069283, 0x8A9136AA]  # RFC 3720, B.4
    assert found == here(HERE / "facts.py")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_both_processors_share_blocks_through_an_aarch64_node(
    machine: Machine, tmp_path: Path, transport: str
) -> None:
    with machine.start(HERE / "node.py", tmp_path / "node.sock") as node:
        assert node.stdout is not None
        url = f"kv://127.0.0.1:{int(node.stdout.readline())}"
        put = machine.run(CLIENT, "put", url, transport)
        assert put == {"landed": True, "stored": 3, "existed": 3, "transport": transport}
        got = {"matched": 3, "leased": 3, "right": True, "transport": transport}
        assert machine.run(CLIENT, "get", url, transport) == got
        assert here(CLIENT, "get", url, transport) == got
        node.communicate(timeout=PATIENCE_S)  # its stdin ends
    assert node.returncode == 0
