"""How fast blocks move beside perftest's own tools, in the same machine. A sanity figure, no bar:
an emulated machine says nothing about an adapter.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.rdma.near import LARGE, NearSide

from kvrouter_store.rdma.base import Copy
from kvrouter_store.rdma.device import VerbsDevice
from kvrouter_store.rdma.ports import SYSFS

pytestmark = pytest.mark.rdma
BLOCK = 64 * 1024
BLOCKS = LARGE // BLOCK
TRIES = 100


def perftest_mb_s(tool: str, device: str, gid_index: int) -> float:
    """What `ib_write_bw` or `ib_read_bw` reaches with blocks of the same size, on this machine."""
    common = [tool, "-d", device, "-x", str(gid_index), "-s", str(BLOCK), "-n", str(BLOCKS), "-F"]
    said = ""
    for _ in range(TRIES):
        with subprocess.Popen(common, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as far:
            said = client_of(far, [*common, "127.0.0.1"])
        line = re.search(rf"^ *{BLOCK} +\d+ +\S+ +(\S+)", said, re.MULTILINE)
        if line and float(line[1]):  # it says 0.00 where it could not tell the processor's clock
            return float(line[1]) * 1.048576  # it counts MiB
    raise AssertionError(said)


def client_of(far: subprocess.Popen[bytes], command: list[str]) -> str:
    """What the client said once the far end listened, which it does some time after its start."""
    said = ""
    try:
        for _ in range(TRIES):
            near = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            said = near.stdout + near.stderr
            if near.returncode == 0 or far.poll() is not None:
                break
    finally:
        far.kill()
    return said


def wire_bytes(device: VerbsDevice) -> int:
    """What has passed the network interface of the device, both ways. A machine's own does not."""
    port = SYSFS / device.name / "ports" / str(device.port.number)
    interface = (port / "gid_attrs/ndevs" / str(device.port.gid_index)).read_text().strip()
    counters = Path("/sys/class/net") / interface / "statistics"
    return sum(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def best_mb_s(copy: Callable[..., None], blocks: list[Copy]) -> float:
    """The better of two runs."""
    took = []
    for _ in range(2):
        started = time.perf_counter()
        copy(*blocks)
        took.append(time.perf_counter() - started)
    return LARGE / min(took) / 1e6


@pytest.mark.parametrize("call", ["write", "read"])
def test_blocks_move_beside_perftest(large: NearSide, peer: tuple[str, int], call: str) -> None:
    device = cast("VerbsDevice", large.device)
    large.memory.bytes[:] = bytes(range(256)) * (LARGE // 256)
    before = wire_bytes(device)
    ours = best_mb_s(getattr(large, call), large.blocks(BLOCKS, BLOCK))
    wire = (wire_bytes(device) - before) / (2 * LARGE)
    said = f"{call} of {BLOCKS} blocks of 64 KiB: {ours:.1f} MB/s"
    if peer[0] != "127.0.0.1":
        said += f", {wire:.3f} bytes on the wire for each byte"
    elif shutil.which(f"ib_{call}_bw"):
        theirs = perftest_mb_s(f"ib_{call}_bw", device.name, device.port.gid_index)
        said += f", {ours / theirs:.2f} of ib_{call}_bw ({theirs:.1f} MB/s)"
    pair = large.queue_pair
    requests = pair.work_requests / (2 * BLOCKS)
    completions = pair.signalled_completions / (2 * BLOCKS)
    print(f"\n{said}; {requests:g} work requests and {completions:g} completions a block")
    assert pair.posted_bytes == 2 * LARGE
