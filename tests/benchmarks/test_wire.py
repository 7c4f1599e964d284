"""The wire benchmark measures what it says: its players answer as it assumes, its bars can fail."""

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.wire import IDS, LEAST, TEXT, Cell, bars
from benchmarks.wire_prompts import (
    BLOCK_TOKENS,
    MARK,
    SHAPES,
    SIZES,
    Shape,
    TextTokenizer,
    prompts,
)
from benchmarks.wire_rig import Process, ask, compile_native, cpu_s
from tokenizers import Tokenizer

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc (apt-get install gcc)")
DIGITS = "1234567"


def cell(router: str, us: float, workload: str = "short") -> Cell:
    return Cell(router, workload, "request", us, 0.0, 0.0, 1000.0, 100.0, 3)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    for name in ("mock", "load"):
        compile_native(name, folder)
    return folder


@pytest.fixture(scope="module")
def saver() -> Iterator[socket.socket]:
    """The socket to which the mock sends the prompts that it prefills."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.settimeout(10)
        listener.bind(("127.0.0.1", 0))
        yield listener


@pytest.fixture(scope="module")
def engines(programs: Path, saver: socket.socket) -> Iterator[list[str]]:
    """HOST:PORT of a prefill and a decode engine."""
    command = [str(programs / "mock"), "-k", "ab" * 32, "-r", "cd" * 32]
    command += ["-t", str(BLOCK_TOKENS), "-n", str(saver.getsockname()[1]), "1", "1"]
    with Process("mock", command, [0], programs) as process:
        yield [f"127.0.0.1:{port}" for port in process.await_output("\n").split()]


def test_a_missing_peer_makes_every_bar_false() -> None:
    held = bars([cell(IDS, 1.0), cell(LEAST, 1.0), cell(TEXT, 1.0)])
    assert len(held) == 4
    assert not any(held.values())


def test_a_bar_holds_up_to_the_peers_own_price() -> None:
    cells = [cell("smg", 100.0), cell(IDS, 100.0), cell(LEAST, 100.01)]
    held = bars(cells)
    assert held[f"{IDS}: short <= 1.0x smg"]
    assert not held[f"{LEAST}: short <= 1.0x smg"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES.values())
def test_the_engine_reads_a_prompt_as_the_benchmark_means_it(
    engines: list[str], shape: Shape, size: int
) -> None:
    prompt = prompts(shape, size)[0]
    body = prompt.body.replace(MARK, DIGITS)[:-1] + ',"return_token_ids":true}'
    answer = ask(f"http://{engines[0]}/v1/completions", body)
    ids = answer["choices"][0]["prompt_token_ids"]
    number = [int("1" + DIGITS)] if prompt.numbered else []
    whole = prompt.tokens + prompt.numbered + number
    assert ids[: len(whole)] == whole
    assert len(ids) - len(whole) in range(1, BLOCK_TOKENS)
    blocks = answer["kv_transfer_params"]["kvstore"]["blocks"]
    assert (blocks, len(whole) % BLOCK_TOKENS) == (len(whole) // BLOCK_TOKENS, 0)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_prefill_engine_sends_the_number_of_a_prompt(
    engines: list[str], saver: socket.socket
) -> None:
    prompt = prompts("ids", SIZES["8 KiB"])[0]
    ask(f"http://{engines[0]}/v1/completions", prompt.body.replace(MARK, DIGITS))
    sent = {saver.recv(64)}
    saver.setblocking(False)
    with suppress(BlockingIOError):  # other tests asked too
        while True:
            sent.add(saver.recv(64))
    assert f"{prompt.tokens[0]} 1{DIGITS}".encode() in sent


def load(programs: Path, engine: str, *options: str, bodies: str) -> dict[str, float]:
    path = programs / "bodies.jsonl"
    path.write_text(bodies)
    command = [str(programs / "load"), "-p", engine.split(":")[1], *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    counted: dict[str, float] = json.loads(done.stdout)
    return counted


def test_every_event_of_every_stream_is_counted_once(programs: Path, engines: list[str]) -> None:
    with urllib.request.urlopen(f"http://{engines[0]}/gap/1000", timeout=5):
        pass
    asked = prompts("text", SIZES["short"], max_tokens=25, stream=True)
    bodies = "".join(prompt.body + "\n" for prompt in asked)
    counted = load(programs, engines[1], "-c", "8", "-t", "20", "-1", bodies=bodies)
    assert (counted["answered"], counted["failed"], counted["events"]) == (8, 0, 8 * 25)


def test_a_prefill_engine_ends_a_stream_after_one_event(programs: Path, engines: list[str]) -> None:
    asked = prompts("text", SIZES["short"], max_tokens=25, stream=True)[0]
    counted = load(programs, engines[0], "-c", "2", "-t", "20", "-1", bodies=asked.body + "\n")
    assert (counted["answered"], counted["events"]) == (2, 2)


def test_cpu_seconds_grow_with_work() -> None:
    before = cpu_s(os.getpid())
    assert sum(range(3_000_000))
    assert cpu_s(os.getpid()) - before > 0.01


def test_the_mock_reads_words_as_the_tokenizer_does(engines: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(TextTokenizer(tmp_path).path))
    for text in ("a trial:\n\tZürich 42 abcd", prompts("text", SIZES["8 KiB"])[0].text):
        body = json.dumps({"model": "m", "prompt": text})
        theirs = ask(f"http://{engines[0]}/tokenize", body)["tokens"]
        assert theirs == tokenizer.encode(text).ids
