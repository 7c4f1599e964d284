"""SIGHUP to a node: other tokens and a renewed certificate, while it serves."""

import os
import secrets
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority, Signed
from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess, chain_of, manifest_of, put_chain
from tests.unit.store.node.test_tls import ask, flags

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import Unauthorized, Untrusted

pytestmark = pytest.mark.slow
MANIFEST = manifest_of(4096)
CHAIN = chain_of(3)
OLD, NEW, OTHERS = (secrets.token_hex(32) for _ in range(3))
FIRST = f"team:{OLD}\nothers:{OTHERS}\n"


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(FIRST)
    return path


@pytest.fixture
def node(tmp_path: Path, token_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path, "64MiB", "--token-file", str(token_path)) as node:
        yield node


def hang_up(node: StoreProcess, said: str) -> None:
    """Send SIGHUP, and wait until the log says so."""
    node.send(signal.SIGHUP)
    assert eventually(lambda: said in node.log), node.log


def status(node: StoreProcess, token: str) -> int:
    """Of /stats over HTTP, for who shows this token."""
    request = urllib.request.Request(f"{node.http_url}/stats")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_another_token_of_a_tenant_keeps_its_blocks_and_ends_who_has_the_old_one(
    node: StoreProcess, token_path: Path
) -> None:
    with (
        StoreClient(node.url, token=OLD) as before,
        StoreClient(node.url, token=OTHERS) as others,
    ):
        put_chain(before, MANIFEST, CHAIN)
        put_chain(others, MANIFEST, CHAIN[:32])
        held, kept = before.acquire(MANIFEST, CHAIN), others.acquire(MANIFEST, CHAIN[:32])
        token_path.write_text(f"# by name, in any order\nothers:{OTHERS}\nteam:{NEW}\n")
        hang_up(node, "tokens were read again; connections that had another: 1, ended")
        with pytest.raises(Unauthorized):
            before.match(MANIFEST, CHAIN)
        assert held.release() is False
        with StoreClient(node.url, token=NEW) as after:
            assert after.match(MANIFEST, CHAIN).blocks == 3
            assert after.stats()["leases"] == 1  # the others'
        assert kept.release() is True
    assert [status(node, token) for token in (OLD, NEW, OTHERS)] == [401, 200, 200]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_text(f"team:{NEW}\n"), "names other tenants"),
        (lambda path: path.write_text(FIRST + f"third:{NEW}\n"), "names other tenants"),
        (lambda path: path.write_text(f"team:{NEW}\nmore:{OTHERS}\n"), "names other tenants"),
        (lambda path: path.write_text("team\n"), "line 1 is not understood"),
        (lambda path: path.chmod(0o604), "can be read by others"),
        (os.unlink, "No such file"),
    ],
)
def test_tokens_that_cannot_be_used_change_nothing(
    node: StoreProcess, token_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    with StoreClient(node.url, token=OLD) as client:
        put_chain(client, MANIFEST, CHAIN)
        lease = client.acquire(MANIFEST, CHAIN)
        spoil(token_path)
        hang_up(node, "tokens stay as they are")
        assert said in node.log
        assert NEW not in node.log
        assert lease.release() is True
    assert [status(node, token) for token in (OLD, NEW)] == [200, 401]


def renewed(shown: Signed, by: Signed) -> None:
    """What an operator does: other files under the same names."""
    shutil.copyfile(by.cert_file, shown.cert_file)
    shutil.copyfile(by.key_file, shown.key_file)


def test_a_renewed_certificate_is_shown_to_who_connects_from_then_on(
    tmp_path: Path, authority: Authority
) -> None:
    shown, later = authority.sign(), Authority(tmp_path, "later")
    with (
        StoreProcess(tmp_path, "64MiB", *flags(shown)) as node,
        StoreClient(node.url, transport="tcp", tls=authority.trust) as before,
    ):
        put_chain(before, MANIFEST, CHAIN)
        lease = before.acquire(MANIFEST, CHAIN)
        renewed(shown, later.sign())
        hang_up(node, "certificates were read again")
        with StoreClient(node.url, transport="tcp", tls=later.trust) as after:
            assert after.match(MANIFEST, CHAIN).blocks == 3
        with (
            StoreClient(node.url, transport="tcp", tls=authority.trust) as stranger,
            pytest.raises(Untrusted),
        ):
            stranger.match(MANIFEST, CHAIN)
        assert lease.release() is True
        assert ask(node, "/stats", later)[0] == 200
        assert ask(node, "/selftest", later)[0] == 200


def test_a_certificate_without_its_key_changes_nothing(
    tmp_path: Path, authority: Authority
) -> None:
    shown = authority.sign()
    with StoreProcess(tmp_path, "64MiB", *flags(shown)) as node:
        shutil.copyfile(authority.sign().cert_file, shown.cert_file)
        hang_up(node, "certificates stay as they are")
        with StoreClient(node.url, transport="tcp", tls=authority.trust) as client:
            assert put_chain(client, MANIFEST, CHAIN) == 3
        assert ask(node, "/stats", authority)[0] == 200


def test_a_node_with_neither_goes_on(tmp_path: Path) -> None:
    with StoreProcess(tmp_path, "64MiB") as node, StoreClient(node.url) as client:
        put_chain(client, MANIFEST, CHAIN)
        hang_up(node, "nothing to read again")
        assert client.match(MANIFEST, CHAIN).blocks == 3
        assert node.stop() == 0
