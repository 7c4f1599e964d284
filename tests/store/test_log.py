"""What a node writes to stderr: JSON lines for programs, plain ones for people."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess

from kvstore.log import JsonFormatter

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
        "kvstore.drain",
        "kvstore.http",
        "kvstore.rdma.serving",
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
    assert ("INFO kvstore.drain: drained in" in written) == (level == "info")
