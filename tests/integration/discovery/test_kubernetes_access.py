"""How an API server is reached: accounts, kubeconfigs, certificates, proxies; no secret leaks."""

import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority, Signed
from tests.fakes.discovery import QUICK
from tests.fakes.kubernetes import KubernetesServer, server_tls
from tests.fakes.pods import pod, write_kubeconfig
from tests.fakes.proxy import proxy
from tests.integration.discovery.conftest import Heard, followed

from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.kubernetes import KubernetesSource
from kvrouter.membership.kubernetes.environment import ServerFinder

PODS = "k8s://test?selector=app=engine"
TOKEN = "a-token-of-the-service-account"
PASSWORD = "the-password-of-the-proxy"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def started(
    tls: ssl.SSLContext | None, token: str | None = TOKEN
) -> AsyncIterator[KubernetesServer]:
    made = KubernetesServer(tls)
    made.token = token
    await made.start()
    made.put("pods", "vllm-0", **pod())
    try:
        yield made
    finally:
        await made.stop()


@pytest_asyncio.fixture
async def server(authority: Authority) -> AsyncIterator[KubernetesServer]:
    async with started(server_tls(authority)) as made:
        yield made


def names(heard: Heard) -> set[str]:
    return {address.partition("=")[0] for address in heard.members or ()}


def by_kubeconfig(path: Path, url: str = PODS) -> KubernetesSource:
    find = ServerFinder({"KUBECONFIG": str(path)})
    return KubernetesSource(url, SourceContext(), find=find, times=QUICK)


# -- the account of a Pod


def mounted(folder: Path, authority: Authority) -> Path:
    """A service account as Kubernetes mounts it."""
    account = folder / "serviceaccount"
    account.mkdir()
    (account / "token").write_text(TOKEN + "\n")
    (account / "namespace").write_text("test")
    (account / "ca.crt").write_bytes(Path(authority.ca_file).read_bytes())
    return account


def in_pod(server: KubernetesServer, account: Path, url: str = PODS) -> KubernetesSource:
    environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.port),
    }
    find = ServerFinder(environment, account)
    return KubernetesSource(url, SourceContext(), find=find, times=QUICK)


async def test_in_a_pod_its_service_account_and_namespace_are_used(
    server: KubernetesServer, authority: Authority, tmp_path: Path
) -> None:
    account = mounted(tmp_path, authority)
    async with followed(in_pod(server, account, "k8s://?selector=app=engine")) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})


async def test_a_token_that_is_replaced_is_read_again(
    server: KubernetesServer, authority: Authority, tmp_path: Path
) -> None:
    account = mounted(tmp_path, authority)
    async with followed(in_pod(server, account)) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})
        server.token = TOKEN + "-2"
        server.end_watches()
        assert "answers 401: Unauthorized: its credentials are not accepted" in (
            await heard.complains()
        )
        (account / "token").write_text(TOKEN + "-2\n")
        server.put("pods", "vllm-1", **pod("10.0.0.2"))
        await heard.until(lambda: names(heard) == {"vllm-0", "vllm-1"} and heard.problem is None)


async def test_a_server_of_another_ca_is_not_shown_the_token(
    server: KubernetesServer, authority: Authority, tmp_path: Path
) -> None:
    account = mounted(tmp_path, authority)
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    (account / "ca.crt").write_bytes(Path(other.ca_file).read_bytes())
    async with followed(in_pod(server, account)) as heard:
        assert "certificate verify failed" in await heard.complains()
    assert server.asked == []


async def test_a_pod_without_an_account_is_told_what_to_do(
    server: KubernetesServer, tmp_path: Path
) -> None:
    async with followed(in_pod(server, tmp_path)) as heard:
        assert "give the router's Pod a serviceAccountName" in await heard.complains()


# -- a kubeconfig


async def test_a_kubeconfig_names_server_ca_token_file_and_namespace(
    server: KubernetesServer, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of-last-week")
    user = {"tokenFile": "token"}  # relative to the kubeconfig
    path = write_kubeconfig(tmp_path, server.url, user=user, ca="ca.pem")
    source = by_kubeconfig(path, "k8s://?selector=app=engine&context=fake")
    async with followed(source) as heard:
        await heard.complains()
        (tmp_path / "token").write_text(TOKEN)
        await heard.until(lambda: names(heard) == {"vllm-0"})


def data_of(path: str) -> str:
    return b64encode(Path(path).read_bytes()).decode()


def shown(signed: Signed, *, as_data: bool) -> dict[str, str]:
    files = {"client-certificate": signed.cert_file, "client-key": signed.key_file}
    return {f"{name}-data": data_of(path) for name, path in files.items()} if as_data else files


@pytest.mark.parametrize("as_data", [True, False], ids=["data", "files"])
@pytest.mark.parametrize("insecure", [True, False], ids=["unchecked", "checked"])
async def test_a_client_certificate_is_shown(
    authority: Authority, tmp_path: Path, as_data: bool, insecure: bool
) -> None:
    async with started(server_tls(authority, clients=True), token=None) as made:
        trust: dict[str, Any] = {"certificate_authority_data": data_of(authority.ca_file)}
        if insecure:
            trust = {"insecure_skip_tls_verify": True}
        user = shown(authority.sign("the-router"), as_data=as_data)
        path = write_kubeconfig(tmp_path, made.url, user=user, **trust)
        async with followed(by_kubeconfig(path)) as heard:
            await heard.until(lambda: names(heard) == {"vllm-0"})


async def test_the_name_in_the_certificate_of_the_server_may_be_another(
    authority: Authority, tmp_path: Path
) -> None:
    async with started(server_tls(authority, "kubernetes.default")) as made:
        user = {"token": TOKEN}
        path = write_kubeconfig(tmp_path, made.url, user=user, ca=authority.ca_file)
        async with followed(by_kubeconfig(path)) as heard:
            assert "certificate verify failed" in await heard.complains()
            more = {"tls_server_name": "kubernetes.default"}
            write_kubeconfig(tmp_path, made.url, user=user, ca=authority.ca_file, **more)
            await heard.until(lambda: names(heard) == {"vllm-0"})


async def test_files_read_in_the_middle_of_their_rotation_are_a_problem_that_passes(
    authority: Authority, tmp_path: Path
) -> None:
    async with started(server_tls(authority, clients=True), token=None) as made:
        signed = authority.sign("the-router")
        key = Path(signed.key_file)
        right, wrong = key.read_bytes(), Path(authority.sign("x").key_file).read_bytes()
        user = shown(signed, as_data=False)
        path = write_kubeconfig(tmp_path, made.url, user=user, ca=authority.ca_file)
        key.write_bytes(wrong)
        async with followed(by_kubeconfig(path)) as heard:
            assert "give a certificate and its key" in await heard.complains()
            key.write_bytes(right)
            await heard.until(lambda: names(heard) == {"vllm-0"})


async def test_a_wrong_ca_is_a_problem(server: KubernetesServer, tmp_path: Path) -> None:
    (tmp_path / "wrong.pem").write_text("no certificate")
    path = write_kubeconfig(tmp_path, server.url, ca="wrong.pem")
    async with followed(by_kubeconfig(path)) as heard:
        assert "give a PEM file of CAs" in await heard.complains()


async def test_credentials_are_sent_by_tls_only(tmp_path: Path) -> None:
    async with started(None) as plain:
        path = write_kubeconfig(tmp_path, plain.url, user={"token": TOKEN})
        async with followed(by_kubeconfig(path)) as heard:
            assert "answers 401" in await heard.complains()


async def test_a_password_is_sent(authority: Authority, tmp_path: Path) -> None:
    pair = b64encode(b"router:pass:word").decode()
    async with started(server_tls(authority), f"Basic {pair}") as made:
        user = {"username": "router", "password": "pass:word"}
        path = write_kubeconfig(tmp_path, made.url, user=user, ca=authority.ca_file)
        async with followed(by_kubeconfig(path)) as heard:
            await heard.until(lambda: names(heard) == {"vllm-0"})


async def test_without_a_cluster_and_a_kubeconfig_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with followed(by_kubeconfig(tmp_path / "none")) as heard:
        assert "give KUBECONFIG, or run the router in a Pod" in await heard.complains()

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    homeless = KubernetesSource(PODS, SourceContext(), find=ServerFinder({}), times=QUICK)
    async with followed(homeless) as heard:
        assert "no kubeconfig ~/.kube/config; give KUBECONFIG" in await heard.complains()


# -- proxies


async def test_a_proxy_leads_to_the_server_and_gets_its_password(
    server: KubernetesServer, authority: Authority, tmp_path: Path
) -> None:
    async with proxy() as between:
        url = f"http://router:{PASSWORD}@127.0.0.1:{between.port}"
        user = {"token": TOKEN}
        path = write_kubeconfig(
            tmp_path, server.url, user=user, ca=authority.ca_file, proxy_url=url
        )
        async with followed(by_kubeconfig(path)) as heard:
            await heard.until(lambda: names(heard) == {"vllm-0"})
    pair = b64encode(f"router:{PASSWORD}".encode()).decode()
    assert between.heads[0].startswith(f"CONNECT 127.0.0.1:{server.port} ")
    assert f"Proxy-Authorization: Basic {pair}" in between.heads[0]
    assert TOKEN not in between.heads[0]


WRONG_PROXIES = {
    b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n": "its proxy answers 407",
    b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n": "its proxy answers 503",
    b"SSH-2.0-OpenSSH\r\n\r\n": "what answers speaks no HTTP",
    b"HTTP/1.1 200 OK\r\n\r\nno handshake": "",
}


@pytest.mark.parametrize("answer", WRONG_PROXIES, ids=["407", "503", "no HTTP", "no TLS"])
async def test_what_a_proxy_does_is_told_without_its_password(
    server: KubernetesServer,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    answer: bytes,
) -> None:
    async with proxy(answer) as between:
        url = f"http://router:{PASSWORD}@127.0.0.1:{between.port}"
        path = write_kubeconfig(tmp_path, server.url, ca=authority.ca_file, proxy_url=url)
        async with followed(by_kubeconfig(path)) as heard:
            told = await heard.complains()
    assert WRONG_PROXIES[answer] in told
    assert PASSWORD not in told + caplog.text


@pytest.mark.parametrize("place", ["127.0.0.1:1", "127.0.0.1:x", "[::1", "a b:1", "xn--é:1"])
async def test_a_proxy_that_cannot_be_is_told_without_its_password(
    server: KubernetesServer, authority: Authority, tmp_path: Path, place: str
) -> None:
    url = f"http://router:{PASSWORD}@{place}"
    path = write_kubeconfig(tmp_path, server.url, ca=authority.ca_file, proxy_url=url)
    async with followed(by_kubeconfig(path)) as heard:
        told = await heard.complains()
    assert "proxy" in told
    assert PASSWORD not in told
