"""vLLM's own tests of its HTTP endpoints: what passes at an engine passes through the router."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.vllm.engines import OFFLINE, Engine, EngineOptions, ask, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3000),
    pytest.mark.tested("vllm", "its own tests of endpoints", "engines"),
]

HERE = Path(__file__).parent
# Not there: what needs images, sound, trained weights, other kinds of models, or to start and end
# the server; /version, where the router says its own; /generative_scoring, which it has not.
SUITES = (
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/tokenize/test_tokenization.py",
)
LEFT_OUT = "openai/chat_completion/test_chat.py::test_invocations"
"""SageMaker's path for both chats and completions, which the router has not."""
MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "facebook/opt-125m",
    "openai-community/gpt2",
)
FLAGS = (
    *("--served-model-name", "tiny", *MODELS),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--enable-tokenizer-info-endpoint", "--enable-scale-out"),
)


class Judge:
    """Runs vLLM's tests against a URL, in a folder with links to the model that is served."""

    def __init__(self, suite: Path, folder: Path, model: Path) -> None:
        self._suite = suite
        self._folder = folder
        for name in MODELS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(model)

    def passed(self, name: str, url: str, cases: Sequence[str] = ()) -> set[str]:
        """Names of the cases that pass at `url`, of all or of these. The log is FOLDER/NAME.log."""
        found, log = self._folder / f"{name}.passed", self._folder / f"{name}.log"
        tests = [self._suite / "tests/entrypoints" / each for each in SUITES]
        command: list[str | Path] = [
            *(self._suite / "bin/python", "-m", "pytest", "-p", "entrypoints_plugin", "-q"),
            *("--rootdir", self._suite, "-c", os.devnull, "--timeout", "60"),
            *("--deselect", f"tests/entrypoints/{LEFT_OUT}"),
            *([self._suite / case for case in cases] or tests),
        ]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KVROUTER")},
            **OFFLINE,
            "PYTHONPATH": f"{self._suite}{os.pathsep}{HERE / 'inside'}",
            "TARGET": url,
            "PASSED": str(found),
        }
        with log.open("wb") as out:
            ended = subprocess.run(
                command,
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=1500,
                check=False,
            )
        assert ended.returncode in {0, 1}, log.read_text(errors="replace")[-4000:]
        return set(found.read_text().splitlines()) if found.exists() else set()


@pytest.fixture
def judge(vllm_python: Path, tmp_path: Path) -> Judge:
    """Its suite and environment are made by make_entrypoints.sh, where they are not there."""
    command = [HERE / "make_entrypoints.sh", vllm_python]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1200)
    return Judge(Path(made.stdout.decode().strip()), tmp_path, model_folder(TINY, vllm_python))


@pytest.fixture
def served(
    vllm_python: Path, site: Path | None, engine_folder: Path
) -> Iterator[tuple[Engine, Service]]:
    """An engine without a connector, and the router before two others."""
    with ExitStack() as cleanup:
        store = start_store(engine_folder, name="store-of-entrypoints")
        cleanup.callback(store.stop)

        def start(name: str, core: str, *, shares: bool) -> Engine:
            transfer = transfer_config(store.url, name=name) if shares else None
            model = model_folder(TINY, vllm_python)
            # Random weights seldom end an answer by themselves: few tokens fit.
            options = EngineOptions(name, model, core, transfer, FLAGS, max_tokens=768)
            return Engine.start(vllm_python, options, engine_folder, site)

        alone = start("alone", "0", shares=False)
        prefill, decode = start("prefill", "0", shares=True), start("decode", "1", shares=True)
        cleanup.enter_context(running([alone, prefill, decode]))
        flags = ["--prefill-threshold", "0"]
        router = start_router(engine_folder, [prefill.url], [decode.url], store.url, flags)
        cleanup.callback(router.stop)
        for engine, role in ((prefill, "prefill"), (decode, "decode")):
            router.wait_log(f"engine {engine.address} joins as {role}")
        yield alone, router


def test_what_passes_at_an_engine_passes_through_the_router(
    judge: Judge, served: tuple[Engine, Service]
) -> None:
    alone, router = served
    passed = judge.passed("alone", alone.url)
    routed = judge.passed("routed", router.url)
    print(f"{len(passed)} pass at an engine, {len(passed & routed)} of them through the router")
    failed = sorted(passed - routed)
    if failed:  # some draw at random
        again = judge.passed("alone-again", alone.url, failed)
        failed = sorted(again - judge.passed("routed-again", router.url, failed))
    assert failed == []
    assert len(passed) > 100  # of the cases whose answers random weights can give
    metrics = ask(router.address, "GET", "/metrics", None, 10.0)[1].decode()
    assert re.search(r'^kvrouter:plans_total\{why="prefill"\} [1-9]\d', metrics, re.M)
