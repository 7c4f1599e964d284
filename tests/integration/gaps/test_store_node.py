"""No client of a shared store node keeps a router's loop from its streams by what it registers."""

import socket
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess, manifest_of
from tests.integration.gaps.meter import MOST_S, GapMeter

from kvrouter_store import _core
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.connection.address import parse_url
from kvrouter_store.errors import BadDocument
from kvrouter_store.identity.block import Manifest

DOC_BYTES = 65_536
DOCUMENTS: dict[str, Callable[[int], bytes]] = {
    "depth": lambda n: b"[" * (DOC_BYTES - n),
    "objects": lambda n: b'{"version":1,"x":[%b{}]}' % (b"{}," * ((DOC_BYTES - 40) // 3 - n)),
    "an endless number": lambda n: manifest_of(4096 + n).doc.replace(
        b'"group":0', b'"group":Infinity'
    ),
    "many parts": lambda n: manifest_of(4096, parts=400, model=f"m{n}").doc,
    "a long number": lambda n: b'{"version":%b}' % (b"9" * (DOC_BYTES - 99 - n)),
    "no text": lambda n: b"\xff" * (DOC_BYTES - n),
}


def register(url: str, documents: list[bytes]) -> None:
    """As a client would that says what it likes."""
    at = parse_url(url)
    with socket.create_connection((at.host, at.port)) as link:
        link.sendall(_core.encode_hello(1, name="stranger"))
        for number, document in enumerate(documents, 2):
            digest = sha256(document).digest()
            spec = sha256(digest).digest()
            frame = _core.encode_register(
                number,
                spec=spec,
                manifest=digest,
                engine="stranger",
                refusal="",
                doc=document,
                parts=[(digest, 4096)],
            )
            link.sendall(frame)
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 20):
            pass


@pytest.mark.parametrize("kind", DOCUMENTS)
async def test_many_long_documents_take_a_turn_each(tmp_path: Path, kind: str) -> None:
    documents = [DOCUMENTS[kind](n) for n in range(60)]
    assert max(map(len, documents)) <= DOC_BYTES
    with StoreProcess(tmp_path) as node:
        register(node.url, documents)
        async with AsyncStoreClient(node.url) as client:
            assert (await client.stats())["manifests"] == 60
            async with GapMeter() as meter:
                found = await client.manifests()
    assert meter.longest_s < MOST_S
    assert len(found) == (60 if kind == "many parts" else 0)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_that_is_no_manifest_is_bad_and_nothing_else(kind: str) -> None:
    if kind == "many parts":
        assert len(Manifest.from_doc(DOCUMENTS[kind](0)).parts) == 400
        return
    with pytest.raises(BadDocument):
        Manifest.from_doc(DOCUMENTS[kind](0))
