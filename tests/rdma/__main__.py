"""`make rdma`: the tests that need an RDMA device, in two emulated machines.

`python -m tests.rdma NAME...` runs some of RUNS alone. Exit status 0 only if all passed; 97 where
no machine can be made here.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.machine import NO_MACHINE, Job, end_on_sigterm, run_machines
from tests.rdma.machine_image import NoMachine, say

ROOT = Path(__file__).resolve().parent.parent.parent
BESIDE_HOST = "10.77.0.2"
BESIDE_S = 120
# A busy host takes three times as long; what hangs has limits of its own.
LIMIT_S = 900
# Python starts slowly in there: no plugin is loaded that these tests do not use.
PYTEST = (
    "python -m pytest -p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider "
    "-o faulthandler_timeout=0 -v -s"
)
STORE = (
    f"kvrouter store --host {BESIDE_HOST} --insecure --port 7400 --http-port 0 "
    "--memory 16MiB --unix-socket none --rdma on"
)
HANDS = "tests.rdma.beside 0.0.0.0 7472"


@dataclass(frozen=True)
class Run:
    """Tests marked `rdma` in one machine, and a module that runs in another one beside it.

    Tests begin when that listens on `port`; `variable` tells them where. Both find the package,
    one of make_peer.sh.
    """

    tests: str
    beside: str
    port: int
    variable: str
    scheme: str = ""
    memory: tuple[str, str] = ("1536M", "1536M")
    package: str = ""


# Add a path to have it run there.
RUNS = {
    "verbs": Run(
        "tests/rdma/test_verbs.py tests/rdma/test_bandwidth.py",
        "tests.rdma.peer 0.0.0.0 7471",
        7471,
        "KVROUTER_RDMA_BESIDE",
    ),
    "store": Run(
        "tests/unit/store/client/test_transport_contract.py tests/rdma/test_faults.py "
        "tests/tools/sim/test_rdma.py",
        STORE,
        7400,
        "KVROUTER_RDMA_STORE",
        "kv://",
    ),
    "fleet": Run("tests/rdma/test_two_machines.py", HANDS, 7472, "KVROUTER_RDMA_HANDS"),
    "infinistore": Run(
        "tests/rdma/test_infinistore.py tests/rdma/test_infinistore_nodes.py",
        HANDS,
        7472,
        "KVROUTER_RDMA_HANDS",
        memory=("4G", "2G"),
        package="infinistore",
    ),
}


def main() -> int:
    """Run all of it, or what is named; the status of what failed first."""
    names = sys.argv[1:]
    try:
        statuses = [run_tests(RUNS[name]) for name in names or RUNS]
        return next(filter(None, statuses), 0)
    except NoMachine as problem:
        say(str(problem))
        return NO_MACHINE


def run_tests(run: Run) -> int:
    """The status of pytest in there."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": package(run.package) if run.package else "",
        run.variable: f"{run.scheme}{BESIDE_HOST}:{run.port}",
    }
    tests = (
        f"timeout {BESIDE_S} bash -c 'until (exec 3<>/dev/tcp/{BESIDE_HOST}/{run.port}) 2>/dev/null"
        "; do sleep 0.2; done' || { echo 'nobody listens in the machine beside'; exit 1; }; "
        f"exec {PYTEST} --timeout 100 --durations=5 -m rdma {run.tests}"
    )
    beside = ["python", "-m", *run.beside.split()]
    jobs = [
        Job(["bash", "-c", tests], ROOT, environment, run.memory[0]),
        Job(beside, ROOT, environment, run.memory[1], cpus=1),
    ]
    return run_machines(jobs, LIMIT_S)


def package(name: str) -> str:
    """The folder of another project's package, which is made once. Raises NoMachine."""
    command = ["benchmarks/connectors/make_peer.sh", name, sys.executable]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        raise NoMachine(f"the package of {name} cannot be installed")
    return made.stdout.strip()


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
