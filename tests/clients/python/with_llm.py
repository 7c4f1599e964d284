# /// script
# requires-python = ">=3.11"
# dependencies = ["llm==0.36"]
# ///
"""Types commands of `llm`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from steps import serve

LLM = (Path(sys.executable).with_name("llm"), "openai", "endpoint", os.environ["OPENAI_BASE_URL"])
ASKED = ("-s", "You are the weather desk of a balloon. " * 10, "Will it rain in Oslo?")
SCHEMA = "city, celsius int"


def llm(*options: str, model: str = "sim") -> subprocess.Popen[str]:
    command = [*LLM, "-m", model, "-o", "temperature", "0", *options, *ASKED]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def chat() -> object:
    return {"text": llm("--no-stream", "-o", "max_tokens", "12").communicate()[0].strip()}


def stream() -> object:
    running = llm("-o", "max_tokens", "12")
    screen = running.stdout.fileno()
    return {"pieces": [piece.decode() for piece in iter(lambda: os.read(screen, 100), b"")]}


def structured() -> object:
    return json.loads(llm("--schema", SCHEMA).communicate()[0])


def unknown_model() -> object:
    return llm(model="none").communicate()[1]


def cancelled() -> object:
    """Control-C, once something is on the screen."""
    running = llm("-o", "max_tokens", "2000")
    seen = running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    running.communicate()
    return bool(seen)


serve(chat, stream, structured, unknown_model, cancelled)
