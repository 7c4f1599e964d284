"""The overhead benchmark measures what it says: nothing is counted without, all of it with."""

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from benchmarks.overhead import OFF, ON, TRACED, Workload, bars, cell, collector
from benchmarks.wire_rig import Process

from kvrouter.tools.demo.cluster import free_port

ROOT = Path(__file__).resolve().parents[2]


def life(*on_us: float) -> list[dict[str, float]]:
    return [{OFF: 100.0, TRACED: 500.0}, *({OFF: 100.0, ON: us} for us in on_us)]


def test_the_bar_is_15_percent_and_can_be_missed() -> None:
    workload = Workload("w", "request", 1, ROOT, 1, 1.0)
    good = cell(workload, [life(105.0, 109.0, 150.0), life(107.0)])
    assert (good.us[ON], good.ratios[ON], good.ratios[TRACED]) == (108.0, 1.08, 5.0)
    assert bars([good]) == {"w": True}
    bad = cell(workload, [life(105.0, 109.0, 150.0), life(125.0)])
    assert bars([bad]) == {"w": False}


def test_the_collector_takes_what_is_sent() -> None:
    with collector() as url:
        request = urllib.request.Request(f"{url}/v1/traces", data=b"x" * 1000)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200


def test_a_silent_router_serves_and_counts_nothing(tmp_path: Path) -> None:
    model, port = free_port(), free_port()
    engine = [str(Path(sys.executable).with_name("kvrouter")), "sim", "--port", str(model)]
    silent = [sys.executable, "-m", "benchmarks.overhead_silent", "serve", "--port", str(port)]
    silent += ["--decode", f"127.0.0.1:{model}", "--no-access-log"]
    with Process("engine", [*engine, "--model", "m"], 0, tmp_path) as one:
        one.await_answer(f"http://127.0.0.1:{model}/health")
        with Process("silent", silent, 0, tmp_path) as router:
            router.await_answer(f"http://127.0.0.1:{port}/health")
            url = f"http://127.0.0.1:{port}"
            for stream in (b"", b',"stream":true'):
                body = b'{"model":"m","prompt":"a b c","max_tokens":4%b}' % stream
                request = urllib.request.Request(
                    f"{url}/v1/completions", body, {"content-type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=30) as answer:
                    assert b"finish_reason" in answer.read()
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
                page = answer.read().decode()
            assert '"request_id"' not in router.output()
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f'kvrouter:{name}_seconds_count{{model="m"}} 0.0' in page
    assert 'kvrouter:prompt_tokens_total{model="m"} 0.0' in page


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_the_load_generator_brings_a_key(tmp_path: Path) -> None:
    from benchmarks.wire_rig import compile_native

    heads: list[str] = []
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heads.append(self.headers.get("authorization", ""))
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        bodies = tmp_path / "bodies"
        bodies.write_text('{"model":"m","prompt":[1],"max_tokens":1}\n')
        command = [str(compile_native("load", tmp_path)), "-p", str(server.server_port)]
        command += ["-c", "1", "-t", "30", "-1", "-k", "sk-one", str(bodies)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as load:
            server.handle_request()
            assert load.stdout is not None
            assert b'"answered": 1' in load.stdout.read()
    assert heads == ["Bearer sk-one"]
