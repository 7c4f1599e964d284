"""What a node writes to stderr: JSON lines for programs, plain ones for people."""

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess

from kvrouter_store.log import MAX_TEXT, JsonFormatter, LogWriter, PlainFormatter

pytestmark = pytest.mark.slow
FIELDS = {"time", "level", "logger", "message"}


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("kvstore.x", logging.WARNING, "x.py", 1, message, args, None)


def test_a_record_is_one_line_whatever_its_message_has() -> None:
    line = JsonFormatter().format(record('two\nlines and a "%s"', "é"))
    assert "\n" not in line
    fields = json.loads(line)
    assert set(fields) == FIELDS
    assert (fields["level"], fields["logger"]) == ("warning", "kvstore.x")
    assert fields["message"] == 'two\nlines and a "é"'


@pytest.mark.parametrize("form", [JsonFormatter(), PlainFormatter()])
def test_what_a_peer_says_makes_no_endless_line(form: logging.Formatter) -> None:
    try:
        raise ValueError("y" * 1_000_000 + "the end")
    except ValueError:
        one = record("the peer says: %s", "x" * 1_000_000)
        one.exc_info = sys.exc_info()
    line = form.format(one)
    assert "the peer says: xxx" in line
    assert f"x [{1_000_015 - MAX_TEXT} characters are left out]" in line
    assert "the end" in line
    assert len(line) < 3 * MAX_TEXT


def test_a_record_with_half_a_surrogate_pair_is_no_lost_line() -> None:
    fields = json.loads(JsonFormatter().format(record("half of a pair: %s", "\ud83d")))
    assert fields["message"] == "half of a pair: ?"


def test_an_exception_stands_in_its_record() -> None:
    try:
        raise ValueError("because")
    except ValueError:
        one = record("it failed")
        one.exc_info = sys.exc_info()
    fields = json.loads(JsonFormatter().format(one))
    assert set(fields) == FIELDS | {"exception"}
    assert "ValueError: because" in fields["exception"]


def test_a_node_in_a_pipe_writes_json_lines_from_its_start_to_its_end(tmp_path: Path) -> None:
    node = StoreProcess(tmp_path).start()
    assert node.stop() == 0
    lines = [json.loads(line) for line in node.log.splitlines()]
    assert all(set(line) == FIELDS for line in lines)
    assert any(line["message"].startswith("drained in") for line in lines)
    assert {line["logger"] for line in lines} <= {
        "kvstore",
        "kvrouter_store.node.signals",
        "kvrouter_store.node.http_api",
        "kvrouter_store.node.rdma_host",
    }


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_node_on_a_terminal_writes_plain_lines_of_its_level(tmp_path: Path, level: str) -> None:
    ours, terminal = os.openpty()
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", "0"]
    command += ["--http-port", "0", "--memory", "1MiB", "--log-level", level]
    command += ["--unix-socket", str(tmp_path / "t.sock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"kvstore ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()
    os.set_blocking(ours, False)
    try:
        written = os.read(ours, 1 << 16).decode()
    except BlockingIOError:
        written = ""
    os.close(ours)
    os.close(terminal)
    assert "{" not in written
    assert ("INFO kvrouter_store.node.signals: drained in" in written) == (level == "info")


def test_a_node_is_ready_before_it_remarks_on_its_host(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", "0"]
    command += ["--http-port", "0", "--memory", "1MiB", "--unix-socket", str(tmp_path / "t.sock")]
    limited = ["bash", "-c", 'ulimit -l 8 && exec "$@"', "bash", *command]
    process = subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    lines: list[str] = []
    while not any("memlock limit of 8.0KiB" in line for line in lines):
        lines.append(process.stdout.readline().decode())
        assert lines[-1], lines
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()
    ready = next(at for at, line in enumerate(lines) if line.startswith("kvstore ready"))
    assert all("open files" in line for line in lines[:ready])


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that holds 4 KiB: its read end and its write end."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def test_lines_reach_a_pipe_whole_and_in_their_order(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    lines = [b"%d %b\n" % (number, b"x" * 90) for number in range(200)]
    for line in lines:
        writer.write(line)
    found = b""
    while len(found) < sum(map(len, lines)):
        found += os.read(pipe[0], 1 << 16)
    assert found == b"".join(lines)
    assert writer.flush()
    assert writer.dropped == 0
    writer.close()


def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1], max_bytes=8192)
    for _ in range(200):
        writer.write(b"x" * 99 + b"\n")
    assert not writer.flush(timeout_s=0.01)
    found = b""
    os.set_blocking(pipe[0], False)
    while not writer.flush(timeout_s=0.01) or select.select(pipe[:1], [], [], 0)[0]:
        with contextlib.suppress(BlockingIOError):  # the writer's turn has not come
            found += os.read(pipe[0], 1 << 16)
    assert found.count(b"\n") + writer.dropped == 200
    held, piped = 8192 // 100, 4096 // 100 + 1  # the pipe may have taken some of them by then
    assert 200 - held - piped <= writer.dropped <= 200 - held
    assert set(found.split(b"\n")) == {b"x" * 99, b""}
    writer.close()


def test_lines_for_a_reader_that_is_gone_are_counted() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    writer = LogWriter(theirs)
    writer.write(b"one\ntwo\n")
    writer.close()
    writer.write(b"three\n")
    assert writer.dropped == 3
    os.close(theirs)
