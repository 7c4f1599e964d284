"""A node under TLS as a process: what it starts with, and its HTTPS side."""

import json
import secrets
import signal
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority, Signed
from tests.fakes.store import StoreProcess, chain_of, manifest_of, put_chain
from tests.unit.store.node.test_start_checks import failed_start

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, tls_of

pytestmark = pytest.mark.slow
MANIFEST = manifest_of(4096)
TOKEN = secrets.token_hex(32)
PATHS = ("/healthz", "/stats", "/metrics", "/engines", "/selftest", "/kvmap_len")


def flags(signed: Signed) -> tuple[str, ...]:
    return ("--tls-cert-file", signed.cert_file, "--tls-key-file", signed.key_file)


def ask(node: StoreProcess, path: str, authority: Authority, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(node.http_url + path)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    trusting = ssl.create_default_context(cafile=authority.ca_file)
    try:
        with urllib.request.urlopen(request, timeout=20, context=trusting) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_clients_and_http_are_served_under_the_same_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    with StoreProcess(tmp_path, "64MiB", *flags(authority.sign())) as node:
        assert node.url.startswith("kvs://")
        assert node.http_url.startswith("https://")
        with StoreClient(node.url, tls=authority.trust) as client:
            assert put_chain(client, MANIFEST, chain_of(3)) == 3
            assert client.transport == "shm"
        for path in PATHS:
            assert ask(node, path, authority)[0] == 200, path
        with socket.create_connection(("127.0.0.1", node.http_port), timeout=20) as plain:
            plain.sendall(b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP")


def test_the_self_test_needs_no_name_in_the_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    named = authority.sign("store.example")
    with StoreProcess(tmp_path, "64MiB", *flags(named)) as node:
        trusting = ssl.create_default_context(cafile=authority.ca_file)
        trusting.check_hostname = False
        with urllib.request.urlopen(node.http_url + "/selftest", context=trusting) as answer:
            assert json.load(answer)["status"] == "ok"


@pytest.mark.parametrize("unix_socket", [(), ("--unix-socket", "none")])
def test_a_node_that_asks_clients_for_certificates_asks_none_over_https(
    tmp_path: Path, authority: Authority, unix_socket: tuple[str, ...]
) -> None:
    asking = ("--tls-ca-file", authority.ca_file)
    with StoreProcess(tmp_path, "64MiB", *flags(authority.sign()), *asking, *unix_socket) as node:
        for path in PATHS:
            assert ask(node, path, authority)[0] == 200, path
        with StoreClient(node.url, transport="tcp", tls=authority.client("engine")) as client:
            assert put_chain(client, MANIFEST, chain_of(2)) == 2


def test_tokens_travel_under_tls_and_are_still_asked_for(
    tmp_path: Path, authority: Authority
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"team:{TOKEN}\n")
    guarded = ("--token-file", str(tokens), "--host", "0.0.0.0")
    with StoreProcess(tmp_path, "64MiB", *flags(authority.sign()), *guarded) as node:
        assert ask(node, "/stats", authority)[0] == 401
        assert ask(node, "/selftest", authority, TOKEN)[0] == 200
        with StoreClient(node.url, tls=authority.trust, token=TOKEN) as client:
            assert client.match(MANIFEST, chain_of(1)).blocks == 0
        assert "in the clear" not in node.log


def test_tokens_without_tls_on_an_address_that_others_reach_are_warned_of(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"team:{TOKEN}\n")
    with StoreProcess(tmp_path, "64MiB", "--token-file", str(tokens), "--host", "0.0.0.0") as node:
        assert node.says("in the clear")
        (line,) = [line for line in node.log.splitlines() if "in the clear" in line]
        assert json.loads(line)["level"] == "warning"
        assert "--tls-cert-file" in line
    with StoreProcess(tmp_path, "64MiB", "--token-file", str(tokens)) as node:
        pass
    assert node.log.count("in the clear") == 1


def test_a_signal_ends_it_cleanly_while_clients_are_there(
    tmp_path: Path, authority: Authority
) -> None:
    node = StoreProcess(tmp_path, "64MiB", *flags(authority.sign())).start()
    with StoreClient(node.url, transport="tcp", tls=authority.trust) as client:
        put_chain(client, MANIFEST, chain_of(2))
        assert node.end(signal.SIGTERM) == 0
    assert "drained" in node.log


def refused(signed: Signed, **more: str) -> str:
    """Why a node does not start with these files."""
    given = {"tls_cert_file": signed.cert_file, "tls_key_file": signed.key_file, **more}
    with pytest.raises(StartRefused) as refusal:
        tls_of(StoreSettings.model_validate(given))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_key_that_others_can_read_or_change_is_refused(authority: Authority, mode: int) -> None:
    signed = authority.sign()
    Path(signed.key_file).chmod(mode)
    assert refused(signed) == (
        f"--tls-key-file {signed.key_file} can be read by others: chmod 600 {signed.key_file}"
    )


def test_a_key_that_the_group_can_read_is_taken(authority: Authority) -> None:
    signed = authority.sign()
    Path(signed.key_file).chmod(0o640)
    files = {"tls_cert_file": signed.cert_file, "tls_key_file": signed.key_file}
    assert tls_of(StoreSettings.model_validate(files)) is not None


def test_files_that_cannot_be_used_are_told_with_the_remedy(authority: Authority) -> None:
    signed, other = authority.sign(), authority.sign()
    both = "give --tls-cert-file FILE and --tls-key-file FILE"
    assert both in refused(signed, tls_key_file="")
    assert both in refused(Signed("", ""), tls_ca_file=authority.ca_file)
    assert "No such file" in refused(signed._replace(key_file="/nowhere.key"))
    assert "No such file" in refused(signed._replace(cert_file="/nowhere.pem"))
    mixed = refused(signed._replace(key_file=other.key_file))
    assert f"key file {other.key_file} cannot be used" in mixed
    no_ca = refused(signed, tls_ca_file=other.key_file)
    assert f"CA file {other.key_file} cannot be used" in no_ca


def test_a_node_with_such_files_says_so_and_exits_with_2(authority: Authority) -> None:
    signed = authority.sign()
    Path(signed.key_file).chmod(0o644)
    assert f"chmod 600 {signed.key_file}" in failed_start(*flags(signed))
