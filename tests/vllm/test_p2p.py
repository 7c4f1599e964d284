"""vLLM's real p2p tiers by what the router's family sends; no CPU build of vLLM runs them whole.

cpu/spec.py: vLLM offloads from CUDA, ROCm and XPU. Its tiers move host memory, which is here.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.vllm.engines import free_port
from tests.vllm.nixl import loopback_environment
from tests.vllm.run_inside import run_inside
from tests.vllm.test_nixl import HOW

from kvrouter.engines.engine import Bootstrap, Engine, Identity, Role
from kvrouter.engines.families.p2p import P2p

MAKE_NEXT = Path(__file__).parent / "make_next.sh"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.tested("vllm", "p2p tier", "code"),
    pytest.mark.tested("next vllm", "p2p tier", "code"),
]


@pytest.fixture(params=["tested", "next"])
def code(request: pytest.FixtureRequest, vllm_python: Path) -> Path | None:
    """The Python code of a newer vLLM, for PYTHONPATH, or none."""
    if request.param == "tested":
        return None
    made = subprocess.check_output([MAKE_NEXT, vllm_python], text=True, timeout=900)
    return Path(made.splitlines()[-1])


def test_a_decode_leg_gets_what_its_prefill_leg_computes_at_the_same_time(
    vllm_python: Path, site: Path | None, code: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = os.environ.get("KVROUTER_NIXL_SITE")
    if not nixl:
        pytest.skip(f"no NIXL: {HOW}")
    for name, value in {**loopback_environment(), "PYTHONHASHSEED": "0"}.items():
        monkeypatch.setenv(name, value)
    host, ports = "127.0.0.1", (free_port(), free_port())
    engine = Engine(f"{host}:8000", Role.PREFILL, "p2p")
    engine.identity = Identity(("m",), bootstrap=Bootstrap(host, ports[0]))
    met = P2p().new_rendezvous(engine)
    params = [leg["kv_transfer_params"].decode() for leg in (met.prefill, met.decode)]
    done = run_inside(vllm_python, [code, site, Path(nixl)], "p2p.py", host, *ports, *params)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"found": ["HIT"] * 4, "same": [True] * 4}
