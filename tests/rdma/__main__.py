"""`make rdma`: the tests that need an RDMA device, in two emulated machines; then what a block
costs in Python, on the host.

Exit status 0 only if all passed; 97 where no machine can be made here.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.machine import NO_MACHINE, Job, end_on_sigterm, run_machines
from tests.rdma.machine_image import NoMachine, image, say

# What runs in the first machine, with another beside it: add a path to have it run there. A test of
# these is marked `rdma`, and finds the second machine in KVROUTER_RDMA_BESIDE (see conftest.py).
INSIDE = ("tests/rdma/test_verbs.py", "tests/rdma/test_bandwidth.py")
# The same in two machines of their own: the second runs a store node (KVROUTER_RDMA_STORE).
STORE_INSIDE = (
    "tests/unit/store/client/test_transport_contract.py",
    "tests/rdma/test_faults.py",
    "tests/tools/sim/test_rdma.py",
)

ROOT = Path(__file__).resolve().parent.parent.parent
BESIDE_HOST = "10.77.0.2"
BESIDE_PORT = 7471
STORE_PORT = 7400
STORE = (
    f"kvrouter store --host {BESIDE_HOST} --insecure --port {STORE_PORT} --http-port 0 "
    "--memory 16MiB --unix-socket none --rdma on"
)
BESIDE_S = 60
LIMIT_S = 480
# Python starts slowly in there: no plugin is loaded that these tests do not use.
PYTEST = "python -m pytest -p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider -v -s"


def main() -> int:
    """Run all of it; the status of what failed first."""
    try:
        peer = ["python", "-m", "tests.rdma.peer", "0.0.0.0", str(BESIDE_PORT)]
        store = ["python", "-m", *STORE.split()]
        return (
            run_tests(INSIDE, peer, BESIDE_PORT, "KVROUTER_RDMA_BESIDE", "")
            or run_tests(STORE_INSIDE, store, STORE_PORT, "KVROUTER_RDMA_STORE", "kv://")
            or run_benchmark()
        )
    except NoMachine as problem:
        say(str(problem))
        return NO_MACHINE


def run_benchmark() -> int:
    """The cost of posting, with the machine's pyverbs on the host's Python: it needs no device."""
    made = image()
    paths = {"PYTHONPATH": str(made.python_path), "LD_LIBRARY_PATH": str(made.libraries)}
    command = [sys.executable, "-m", "benchmarks.rdma_post"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, check=False).returncode


def run_tests(
    paths: Sequence[str], beside: Sequence[str], port: int, variable: str, scheme: str
) -> int:
    """The status of pytest in there, with a command in the machine beside it.

    Tests begin when that listens on `port`; `variable` tells them where.
    """
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        variable: f"{scheme}{BESIDE_HOST}:{port}",
    }
    tests = (
        f"timeout {BESIDE_S} bash -c 'until (exec 3<>/dev/tcp/{BESIDE_HOST}/{port}) 2>/dev/null;"
        " do sleep 0.2; done' || { echo 'nobody listens in the machine beside'; exit 1; }; "
        f"exec {PYTEST} --timeout 100 --durations=5 -m rdma {' '.join(paths)}"
    )
    jobs = [
        Job(["bash", "-c", tests], ROOT, environment),
        Job(beside, ROOT, environment, cpus=1),
    ]
    return run_machines(jobs, LIMIT_S)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
