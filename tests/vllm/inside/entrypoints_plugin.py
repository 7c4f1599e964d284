"""A pytest plugin that gives vLLM's own tests a server that runs already, at $TARGET.

It writes into $PASSED what passes, a line for each case.

It is loaded by the environment of make_entrypoints.sh, in a folder in which the models that the
tests name are links to the one that is served, so that their tokenizers load offline.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tests.utils as vllm_tests  # type: ignore[import-not-found]
from vllm.transformers_utils import repo_utils

TARGET = urlsplit(os.environ["TARGET"])


class Running(vllm_tests.RemoteVLLMServer):  # type: ignore[misc]
    """The server that runs, whatever model and flags a test asks for."""

    def __init__(self, model: str, vllm_serve_args: Any = (), **_: Any) -> None:
        self.uds, self.host, self.port = None, TARGET.hostname, TARGET.port
        self.proc = None
        self.show_hidden_metrics = False

    def __exit__(self, *_: object) -> None:
        """It is not the test's to end."""


class Hub:
    """The hub's client without a hub: adapters that tests ask for are folders that exist."""

    snapshot_download = staticmethod(lambda *_, **__: os.getcwd())


def pytest_runtest_logreport(report: Any) -> None:
    """Note a case that passes."""
    if report.when == "call" and report.passed:
        with Path(os.environ["PASSED"]).open("a") as passed:
            passed.write(f"{report.nodeid}\n")


vllm_tests.RemoteOpenAIServer = vllm_tests.RemoteOpenAIServerCustom = Running
repo_utils.hf_api = Hub
