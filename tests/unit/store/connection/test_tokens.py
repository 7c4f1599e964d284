"""Tokens between clients and a node: who is served, what a refusal says, and what it never says."""

import logging
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.patience import until
from tests.fakes.store import chain_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import StoreServer
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Channel, Credentials
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.tokens import TOKEN, check_token
from kvrouter_store.errors import StoreRefused, Unauthorized
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, tokens_of

MIB = 1 << 20
MANIFEST = manifest_of(4096)
# Tests are named by them: they are the same in every process that runs some.
GOOD, WRONG = (sha256(name).hexdigest() for name in (b"good", b"wrong"))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[StoreServer]:
    """A node that asks for a token."""
    node = StoreServer(
        unix_path=str(tmp_path / "s.sock"), pool_bytes=16 * MIB, tenants=[("team", GOOD)]
    )
    node.start()
    yield node
    node.stop()


@pytest.mark.parametrize("transport", ["auto", "shm", "unix", "tcp"])
def test_a_client_with_the_token_is_served_on_every_transport(
    guarded: StoreServer, transport: TransportName
) -> None:
    url = f"kv://127.0.0.1:{guarded.port}"
    with StoreClient(url, transport=transport, token=GOOD) as client:
        assert put_chain(client, MANIFEST, chain_of(3)) == 3
        assert client.match(MANIFEST, chain_of(4)).blocks == 3
    assert guarded.stats()["unauthorized_total"] == 0


@pytest.mark.parametrize("transport", ["auto", "shm", "unix", "tcp"])
@pytest.mark.parametrize("token", ["", WRONG, GOOD[:-1], GOOD + "0"])
def test_a_client_without_it_is_refused_in_a_sentence_with_the_remedy(
    guarded: StoreServer, transport: TransportName, token: str
) -> None:
    url = f"kv://127.0.0.1:{guarded.port}"
    with StoreClient(url, transport=transport, token=token) as client:
        with pytest.raises(Unauthorized, match="KVROUTER_STORE_TOKEN") as refused:
            client.match(MANIFEST, chain_of(1))
        assert refused.value.status == "UNAUTHORIZED"
        assert isinstance(refused.value, StoreRefused)
        assert not token or token not in str(refused.value)
    assert guarded.stats()["unauthorized_total"] >= 1
    assert guarded.stats()["manifests"] == 0


def test_the_refusal_ends_the_connection_and_tells_missing_from_wrong_by_nothing(
    guarded: StoreServer,
) -> None:
    def refusal(token: str) -> str:
        address = parse_url(f"kv://127.0.0.1:{guarded.port}")
        with pytest.raises(Unauthorized) as refused:
            Channel(address, Credentials("x", token), Deadline(5))
        return str(refused.value)

    assert refusal("") == refusal(WRONG) == refusal(GOOD[1:])


def test_a_node_without_tokens_takes_any(server: StoreServer) -> None:
    for token in ("", WRONG):
        with StoreClient(f"kv://127.0.0.1:{server.port}", token=token) as client:
            assert client.match(MANIFEST, chain_of(1)).blocks == 0
    assert server.admits("")
    assert server.admits(WRONG)


async def test_the_asyncio_client_shows_its_token(guarded: StoreServer) -> None:
    url = f"kv://127.0.0.1:{guarded.port}"
    async with AsyncStoreClient(url, token=GOOD) as client:
        assert (await client.match(MANIFEST, chain_of(1))).blocks == 0
    assert guarded.stats()["unauthorized_total"] == 0


async def test_the_asyncio_client_says_and_logs_once_that_it_is_refused(
    guarded: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = AsyncStoreClient(f"kv://127.0.0.1:{guarded.port}", token=WRONG)
    client.start()
    await until(lambda: guarded.stats()["unauthorized_total"] >= 3)
    with pytest.raises(Unauthorized, match="KVROUTER_STORE_TOKEN"):
        await client.match(MANIFEST, chain_of(1))
    await client.close()
    (record,) = [
        one for one in caplog.records if one.name == "kvrouter_store.client.asyncio_client"
    ]
    assert record.levelno == logging.WARNING
    assert WRONG not in caplog.text


@pytest.mark.parametrize(
    "made",
    [
        lambda token: StoreClient("kv://127.0.0.1:1", token=token),
        lambda token: AsyncStoreClient("kv://127.0.0.1:1", token=token),
    ],
)
@pytest.mark.parametrize("token", ["short", "x" * 513, "with a space in the middle", "nul\0" * 8])
def test_what_cannot_be_a_token_is_refused_before_it_is_sent(
    made: Callable[[str], object], token: str
) -> None:
    with pytest.raises(ValueError, match="openssl rand") as refused:
        made(token)
    assert token not in str(refused.value)


def test_an_address_with_a_token_in_it_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="KVROUTER_STORE_TOKEN") as refused:
        parse_url(f"kv://{GOOD}@127.0.0.1:7400")
    assert GOOD not in str(refused.value)


def test_no_client_shows_its_token() -> None:
    blocking = StoreClient("kv://127.0.0.1:1", token=GOOD)
    assert GOOD not in repr(blocking) + str(blocking)
    assert GOOD not in repr(AsyncStoreClient("kv://127.0.0.1:1", token=GOOD))


@given(st.text(max_size=600))
def test_every_token_that_is_taken_travels(text: str) -> None:
    try:
        token = check_token(text)
    except ValueError:
        assert not TOKEN.fullmatch(text)
        return
    assert token.encode() in _core.encode_hello(1, token=token)


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def tokens_in(path: Path) -> list[tuple[str, str]]:
    return tokens_of(StoreSettings.model_validate({"token_file": str(path)}))


def test_a_file_of_tokens_has_one_tenant_on_each_line(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"# ours\n\n team-a:{GOOD}\nteam.b:{WRONG}\r\n", 0o640)
    assert tokens_in(path) == [("team-a", GOOD), ("team.b", WRONG)]


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path, f"a:{GOOD}\n", mode)
    with pytest.raises(StartRefused, match=f"chmod 600 {path}"):
        tokens_in(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names 0 tenants"),
        (f"{GOOD}\n", "line 1 is not understood"),
        (f"a b:{GOOD}\n", "line 1 is not understood"),
        (f"a:{GOOD}\na:{WRONG}\n", "line 2 names tenant 'a' again"),
        (f"a:{GOOD}\nb:{GOOD}\n", "line 2 has another tenant's token"),
        ("a:tooshort\n", "line 1: a token is 16 to 512"),
        ("a:" + "x" * (2 * MIB), "longer than 1 MiB"),
    ],
)
def test_a_file_that_is_wrong_is_told_by_its_line_and_never_by_its_tokens(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(StartRefused, match=told) as refused:
        tokens_in(token_file(tmp_path, text))
    assert GOOD not in str(refused.value)
    assert "tooshort" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="No such file"):
        tokens_in(tmp_path / "nowhere")
    with pytest.raises(StartRefused, match="Is a directory"):
        tokens_in(tmp_path)
    path = token_file(tmp_path, "")
    path.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(StartRefused, match="--token-file"):
        tokens_in(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert tokens_of(StoreSettings.model_validate({"host": host})) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "2001:db8::7"])
def test_any_other_address_needs_tokens_or_the_word_that_it_is_to_have_none(
    host: str, tmp_path: Path
) -> None:
    with pytest.raises(StartRefused, match=r"--token-file .*--host 127\.0\.0\.1.*--insecure"):
        tokens_of(StoreSettings.model_validate({"host": host}))
    assert tokens_of(StoreSettings.model_validate({"host": host, "insecure": True})) == []
    path = str(token_file(tmp_path, f"a:{GOOD}"))
    settings = StoreSettings.model_validate({"host": host, "token_file": path})
    assert tokens_of(settings) == [("a", GOOD)]
