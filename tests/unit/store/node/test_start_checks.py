"""A node that others reach, as a process: what it starts with, and who may use its HTTP side."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from hashlib import sha256
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store.client.blocking import StoreClient

pytestmark = pytest.mark.slow
MANIFEST = manifest_of(4096)
PATH = {"PATH": os.environ["PATH"]}  # an editable install looks there for what rebuilds it
TOKEN = sha256(b"token").hexdigest()  # tests are named by it: the same in every process
CLOSED = [
    ("GET", "/metrics"),
    ("GET", "/stats"),
    ("GET", "/engines"),
    ("GET", "/selftest"),
    ("GET", "/selftest/7"),
    ("GET", "/kvmap_len"),
    ("POST", "/purge"),
]


@pytest.fixture(scope="module")
def token_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "tokens"
    path.touch(0o600)
    path.write_text(f"team:{TOKEN}\n")
    return path


@pytest.fixture(scope="module")
def node(token_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    flags = ("--token-file", str(token_path))
    with StoreProcess(tmp_path_factory.mktemp("node"), "64MiB", *flags) as node:
        yield node


def ask(
    node: StoreProcess, method: str, path: str, authorization: str = ""
) -> tuple[int, str, Message]:
    request = urllib.request.Request(node.http_url + path, method=method)
    if authorization:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def failed_start(*flags: str, **environment: str) -> str:
    """The one sentence of a node that exits 2."""
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", "0", *flags]
    command += ["--http-port", "0", "--unix-socket", "none", "--memory", "1MiB"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=PATH | environment
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer \u00e9"],
)
def test_http_is_closed_to_whoever_brings_no_token(
    node: StoreProcess, method: str, path: str, authorization: str
) -> None:
    status, body, headers = ask(node, method, path, authorization)
    assert status == 401
    assert headers["WWW-Authenticate"].startswith("Bearer")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_http_is_open_to_whoever_brings_one(node: StoreProcess, method: str, path: str) -> None:
    status, body, _ = ask(node, method, path, f"Bearer {TOKEN}")
    assert status == 200, body


def test_a_supervisor_without_a_token_sees_that_the_node_serves(node: StoreProcess) -> None:
    status, body, _ = ask(node, "GET", "/healthz")
    assert (status, json.loads(body)) == (200, {"status": "ok"})


def test_refused_requests_are_counted(node: StoreProcess) -> None:
    def refused() -> int:
        _, body, _ = ask(node, "GET", "/stats", f"bearer {TOKEN}")
        return int(json.loads(body)["unauthorized_total"])

    before = refused()
    ask(node, "POST", "/purge")
    assert refused() == before + 1


def test_engines_that_share_nothing_stand_in_the_metrics_of_a_guarded_node(
    node: StoreProcess,
) -> None:
    with StoreClient(node.url, token=TOKEN) as client:
        client.register(MANIFEST, engine="http://e:1", refusal="why")
        _, text, _ = ask(node, "GET", "/metrics", f"Bearer {TOKEN}")
    assert 'kvstore:sharing_refused{engine="http://e:1",reason="why"} 1.0' in text.splitlines()


def test_a_node_that_others_reach_starts_with_tokens_or_by_the_word_insecure(
    token_path: Path, tmp_path: Path
) -> None:
    for flags in (("--token-file", str(token_path)), ("--insecure", "true")):
        with StoreProcess(tmp_path, "64MiB", "--host", "0.0.0.0", *flags) as node:
            with StoreClient(node.url, token=TOKEN) as client:
                assert put_chain(client, MANIFEST, chain_of(2)) == 2
            assert ask(node, "GET", "/selftest", f"Bearer {TOKEN}")[0] == 200


def test_a_node_without_tokens_takes_no_notice_of_one(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as node:
        for _, path in CLOSED[:-1]:
            assert ask(node, "GET", path, "Bearer x")[0] == 200


@pytest.mark.parametrize("mode", ["0600", "0660", "0666"])
def test_the_socket_has_the_mode_that_was_asked_for(tmp_path: Path, mode: str) -> None:
    flags = () if mode == "0600" else ("--unix-socket-mode", mode)
    with StoreProcess(tmp_path, "64MiB", *flags) as node:
        assert oct(Path(node.unix_path).stat().st_mode & 0o7777) == oct(int(mode, 8))


def test_without_either_it_says_what_to_give_and_exits_with_2() -> None:
    sentence = failed_start("--host", "0.0.0.0")
    assert "--token-file" in sentence
    assert "--insecure" in sentence


def test_a_quota_of_nobody_ends_the_start_with_2(token_path: Path) -> None:
    tokens = ("--token-file", str(token_path))
    assert "'nobody', and --token-file does not" in failed_start(*tokens, "--quota", "nobody=1MiB")
    assert "--quota: the quotas are 2.0GiB, more" in failed_start(*tokens, "--quota", "team=2GiB")


def test_tokens_that_others_can_read_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"team:{TOKEN}\n")
    path.chmod(0o644)
    by_flag = failed_start("--token-file", str(path))
    by_environment = failed_start(KVROUTER_STORE_TOKEN_FILE=str(path))
    assert f"chmod 600 {path}" in by_flag == by_environment
    assert TOKEN not in by_flag


@pytest.mark.parametrize("command", ["serve", "sim"])
def test_the_token_of_a_client_is_shown_by_no_command(command: str) -> None:
    variable = {"serve": "KVROUTER_STORE_TOKEN", "sim": "KVROUTER_SIM_STORE_TOKEN"}[command]

    def output(token: str) -> tuple[int, str]:
        program = Path(sys.executable).with_name("kvrouter")
        done = subprocess.run(
            [program, "config", "show", command, "--model", "m"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=PATH | {variable: token, "KVROUTER_DECODE": "127.0.0.1:1"},
        )
        return done.returncode, done.stdout + done.stderr

    code, shown = output(TOKEN)
    assert code == 0, shown
    assert f"environment {variable}" in shown
    assert TOKEN not in shown
    code, shown = output("not a token")
    assert code == 2
    assert "openssl rand -hex 32" in shown
    assert "not a token" not in shown


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tier", "redis://a", "--tier-timeout", "5"], "--tier-timeout '5': give at most 1"),
        (["--tier", "redis://a", "--tier-memory", "1KiB"], "--tier-memory: give at least 1MiB"),
        (["--tier-timeout", "0.5"], "--tier-timeout needs --tier"),
        (["--tier-memory", "8MiB"], "--tier-memory needs --tier"),
    ],
)
def test_flags_of_tiers_that_cannot_work_are_refused(flags: list[str], sentence: str) -> None:
    assert sentence in failed_start(*flags)
