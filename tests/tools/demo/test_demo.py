"""`kvrouter demo` as a user runs it: to its end, stopped half-way, and killed."""

import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from tests.tools.demo.running import QUICK, Running, all_gone

from kvrouter.cli.main import main


def test_it_ends_well_with_figures_and_leaves_nothing_behind(running: type[Running]) -> None:
    demo = running(*QUICK)
    demo.until("killing prefill-0")
    assert demo.end() == 0, demo.said
    assert len(demo.children) == 6
    assert all_gone(demo.children)
    assert "14 of 14 answers complete and right" in demo.said
    assert re.search(r"cold .* TTFT median +[\d.]+ ms", demo.said)
    assert re.search(r"warm .* TTFT median +[\d.]+ ms", demo.said)
    assert re.search(r"hit rate \d+\.\d%", demo.said)
    assert "\x1b" not in demo.said


def test_with_keep_it_answers_until_sigint(running: type[Running]) -> None:
    demo = running(*QUICK, "--keep")
    url = demo.until(r"curl (http://\S+)")[1]
    body = b'{"model": "demo-8b", "prompt": "Once upon a time", "max_tokens": 4}'
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 0
    assert all_gone(demo.children)


def test_stopped_half_way_it_takes_everything_with_it(running: type[Running]) -> None:
    demo = running(*QUICK)
    demo.until("cold")
    demo.process.send_signal(signal.SIGTERM)
    assert demo.end() == 130
    assert demo.children
    assert all_gone(demo.children)


def test_killed_it_takes_everything_with_it(running: type[Running]) -> None:
    demo = running(*QUICK)
    demo.until("cold")
    demo.process.kill()
    demo.process.wait()
    assert len(demo.children) == 6
    assert all_gone(demo.children)


def test_no_torch_is_imported_on_the_way() -> None:
    code = (
        "import sys, kvrouter.tools.demo.run, kvrouter.tools.sim.serve;"
        "import kvrouter.app.store_node;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'vllm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "flags", ["--engine vllm --vllm-python py --model m", "--engine=torch", "--start-timeout 9"]
)
def test_flags_of_real_engines_are_answered_with_the_pages_that_start_them(
    capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    assert main(["demo", *flags.split()]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == flags.count("--")
    for each in told:
        assert "docs/quickstart-vllm.md starts vLLM engines, docs/torch.md the torch" in each
