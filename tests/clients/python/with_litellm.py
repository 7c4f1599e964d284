# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm[proxy]==1.108.7"]
# ///
"""Chats with OpenAI's client through a LiteLLM proxy that stands in front of the server."""

import importlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steps import serve

CONFIG = """
model_list:
  - model_name: "*"
    litellm_params:
      model: openai/*
      api_base: os.environ/OPENAI_BASE_URL
      api_key: os.environ/OPENAI_API_KEY
"""
LITELLM = Path(sys.executable).with_name("litellm")
KEY = f"sk-{secrets.token_hex(32)}"
START_S = 120.0


@contextmanager
def proxy() -> Iterator[str]:
    """The URL of a proxy before OPENAI_BASE_URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(CONFIG)
        config.flush()
        running = subprocess.Popen(
            [LITELLM, "--config", config.name, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY},
        )
        try:
            wait_for(port, running)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(10)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Return once it listens."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("LiteLLM's proxy does not listen")


with proxy() as url:
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY}
    with_openai = importlib.import_module("with_openai")
    serve(
        with_openai.chat,
        with_openai.stream,
        with_openai.tool,
        with_openai.streamed_tool,
        with_openai.structured,
        with_openai.unknown_model,
        with_openai.cancelled,
    )
