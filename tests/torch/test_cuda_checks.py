"""The checks of benchmarks.cuda say yes to a device that works, and no to one that does not."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.cuda import __main__ as command
from benchmarks.cuda import exact, killed, order, overlap, speed, sticky
from benchmarks.cuda.check import Answer, interval
from benchmarks.cuda.gpu import Gpu
from benchmarks.cuda.pool import mapped, sealed_file, tensor_at
from tests.torch.pretended_gpu import ERROR, pretended_gpu

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
SIZE = 1 << 20
Check = Callable[[Gpu], Answer]


def exactly(gpu: Gpu) -> Answer:
    return exact.check(gpu, most_bytes=SIZE)


def in_order(gpu: Gpu) -> Answer:
    return order.check(gpu, rounds=1, spin_s=0.02)


@pytest.mark.parametrize("check", [exactly, in_order, sticky.check])
def test_a_device_that_works_gets_a_yes(check: Check) -> None:
    with pretended_gpu() as gpu:
        assert check(gpu).passed


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (exactly, "early"),
        (exactly, "lossy"),
        (in_order, "unordered"),
        (in_order, "early"),
        (sticky.check, "forgetful"),
    ],
)
def test_a_device_that_does_not_gets_a_no(check: Check, fault: str) -> None:
    with pretended_gpu(fault) as gpu:
        assert not check(gpu).passed


def test_without_the_batch_function_the_copier_alone_is_checked() -> None:
    with pretended_gpu() as gpu:
        gpu.batch_copy = None
        answer = exactly(gpu)
    assert answer.passed
    assert "no cuMemcpyBatchAsync here" in answer.says


def test_a_refused_batch_says_what_cuda_said() -> None:
    with pretended_gpu() as gpu:
        gpu.corrupt()
        gpu.synchronize()
        assert gpu.batch_copy is not None
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            gpu.batch_copy.submit([], [], [])


def test_refusals_after_an_error_are_told_with_their_reason() -> None:
    with pretended_gpu() as gpu:
        refusals = sticky.check(gpu).figures["refusals"]
    assert len(refusals) == 4
    assert all(ERROR in reason for reason in refusals.values())


def test_speed_is_judged_beside_a_plain_copy() -> None:
    with pretended_gpu() as gpu:
        answer = speed.check(gpu, total=8 * SIZE, pages=[4096, SIZE])
    figures = answer.figures
    ring = figures["ring, by threads"]
    assert figures["share"] == max(ring.values()) / figures["plain pinned copy"]["out"]
    assert answer.passed == (figures["share"] >= speed.BAR)
    for part in ("ring", "load", "batch"):
        assert all(each > 0 for each in figures[f"{part}, by bytes of a page"].values())


def test_computing_is_timed_alone_and_beside_copies() -> None:
    with pretended_gpu() as gpu:
        answer = overlap.check(gpu, size=256, products=20, rounds=1)
    figures = answer.figures
    assert figures["copies_per_s"] > 0
    enough = figures["share_of_copies"] >= overlap.LEAST_COPIED
    assert answer.passed == (enough and figures["ratio"]["median"] <= overlap.BAR)


def test_an_interval_leaves_out_one_of_twenty_at_each_end() -> None:
    assert interval(range(20)) == {"median": 9.5, "low": 1, "high": 18}
    assert interval([3.0]) == {"median": 3, "low": 3, "high": 3}


def test_a_sealed_file_is_the_same_memory_in_every_map() -> None:
    with sealed_file(SIZE) as file, mapped(file, SIZE) as one:
        with mapped(file, SIZE, writable=False) as other:
            tensor_at(one, SIZE).fill_(7)
            assert set(tensor_at(other, SIZE).tolist()) == {7}
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)


WRITER = """
import os, sys, time
sys.path[:0] = {path}
from benchmarks.cuda.pool import mapped, tensor_at
file, pipe, size = map(int, sys.argv[1:])
parent, until = os.getpid(), time.monotonic() + 60
if {survives}:
    if os.fork():
        os.wait()
    os.close(pipe)
with mapped(file, size) as address:
    memory = tensor_at(address, size)
    memory += 1
    print("writing", flush=True)
    while time.monotonic() < until:
        memory += 1
        if os.getppid() != parent and {survives}:
            until = min(until, time.monotonic() + 0.1)
"""


@pytest.mark.parametrize("survives", [False, True])
def test_writing_after_the_death_of_a_process_is_seen(survives: bool) -> None:
    """A child of the killed process, which goes on writing, stands for a GPU that does."""
    script = WRITER.format(path=[str(ROOT), *sys.path], survives=survives)
    ending = killed.killed([sys.executable, "-c", script], SIZE)
    assert (ending.last_change_s > 0) == survives


def test_each_question_has_a_module_that_answers_it() -> None:
    for name in command.QUESTIONS:
        assert callable(importlib.import_module(f"benchmarks.cuda.{name}").check)
    assert set(command.DECIDING) < set(command.QUESTIONS)


def test_no_compiled_module_is_needed() -> None:
    names = [f"benchmarks.cuda.{name}" for name in command.QUESTIONS]
    script = (
        "import sys, importlib\n"
        f"sys.path[:0] = {[str(ROOT), *sys.path]}\n"
        "sys.modules['kvrouter_store._core'] = None\n"
        f"[importlib.import_module(name) for name in {names}]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU: run on a machine without")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "benchmarks.cuda: run this on a machine with a GPU: torch finds none\n"
    )


def test_an_answer_that_dies_is_a_no_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = command.asked("order")
    assert found["passed"] is False
    assert found["says"].startswith("ended with status 1: ")


def test_a_no_ends_with_status_1_unless_it_only_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "machine", lambda: {"gpu": "none"})
    for refused, status in (("order", 1), ("killed", 0)):
        monkeypatch.setattr(
            command,
            "asked",
            lambda name, refused=refused: {"passed": name != refused, "says": "", "figures": {}},
        )
        file = tmp_path / f"{refused}.json"
        assert command.main(["--json", str(file)]) == status
        written = json.loads(file.read_text())["answers"]
        assert [name for name, each in written.items() if not each["passed"]] == [refused]
