"""No server that the router asks keeps its loop from its streams, whatever it answers."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.contract.stores.backends import BLOCK_TOKENS, IDENTITY
from tests.integration.gaps.answerer import Answerer
from tests.integration.gaps.meter import MOST_S, GapMeter

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import Families
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.detect import EngineDetector
from kvrouter.membership.kubernetes.api import MAX_PAGE_BYTES
from kvrouter.membership.kubernetes.engines import NOTHING
from kvrouter.membership.kubernetes.mirror import MAX_LINE_BYTES, Mirror, Unreadable
from kvrouter.membership.kubernetes.objects import Pod
from kvrouter.membership.probe_client import MAX_ANSWER_BYTES as PROBE_BYTES
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.prefix.stores import foreign_store
from kvrouter.prefix.stores.base import Origin
from kvrouter.prefix.stores.polling import MAX_ANSWER_BYTES as PEER_BYTES
from kvrouter_store.identity.chain import hash_tokens, root_hash

TOKENS = list(range(64 * BLOCK_TOKENS))
HASHES = hash_tokens(TOKENS, BLOCK_TOKENS, root=root_hash(None))

Shape = Callable[[int], bytes]
"""Makes a text of at most so many bytes."""


def many(item: bytes, head: bytes = b"[", end: bytes = b"]") -> Shape:
    """As many of `item` as fit."""
    return lambda most: head + b",".join([item] * ((most - 100) // (len(item) + 1))) + end


def members(value: bytes, head: bytes, end: bytes) -> Shape:
    """As many members of different names as fit."""
    each = len(value) + 12
    return lambda most: (
        head + b",".join(b'"%08d":%b' % (n, value) for n in range((most - 100) // each)) + end
    )


SHAPES: dict[str, Shape] = {
    "numbers": many(b"1"),
    "lists": many(b"[]"),
    "objects": many(b'{"a":{}}', b'{"x":[', b"]}"),
    "members": members(b"{}", b"{", b"}"),
    "depth": lambda most: b"[" * (most - 1),
    "one text": lambda most: b'"' + b"x" * (most - 10) + b'"',
    "a text without an end": lambda most: b'"' + b'\\"' * ((most - 10) // 2),
    "no JSON": lambda most: b"\xff" * most,
}
KEY = b'{"chunk_hash_hex":"","model_name":"","kv_rank":0,"object_group_id":0,"cache_salt":""}'
LMCACHE: dict[str, Shape] = {
    "results": many(b'{"key":%b,"placements":[]}' % KEY, b'{"chunks":1,"results":[', b"]}"),
    "placements": many(
        b'{"tier":""}', b'{"chunks":1,"results":[{"key":%b,"placements":[' % KEY, b"]}]}"
    ),
    "unknown members": many(b"[]", b'{"chunks":1,"results":[],"x":[', b"]}"),
    "tokens": many(b"1", b'{"chunks":1,"results":[],"x":[', b"]}"),
}
MOONCAKE: dict[str, Shape] = {
    "keys": members(b'{"ok":true}', b'{"data":{', b"}}"),
    "empty": members(b"{}", b'{"data":{', b"}}"),
}
MODELS: dict[str, Shape] = {
    "models": many(b'{"id":"m"}', b'{"data":[', b"]}"),
    "owners": many(b"[]", b'{"data":[{"id":"m","owned_by":[', b"]}]}"),
}
METRICS: dict[str, Shape] = {
    "one line": lambda most: (
        b"vllm:cache_config_info{" + b'block_size="x",num_gpu_blocks="' * (most // 40)
    ),
    "many lines": lambda most: b'vllm:num_requests_running{engine="0"} 1\n' * (most // 41),
    "begun lines": lambda most: b"vllm:cache_config_info{\n" * (most // 24),
    "digits": lambda most: b'vllm:cache_config_info{block_size="' + b"1" * (most - 99) + b'"} 1\n',
}


@pytest.mark.parametrize("shape", [*LMCACHE, *SHAPES])
async def test_lmcaches_coordinator(shape: str) -> None:
    await match("lmcache", "/directory/lookup", (LMCACHE | SHAPES)[shape](PEER_BYTES))


@pytest.mark.parametrize("shape", [*MOONCAKE, *SHAPES])
async def test_mooncakes_master(shape: str) -> None:
    await match("mooncake", "/batch_query_keys?keys=m", (MOONCAKE | SHAPES)[shape](PEER_BYTES))


async def match(kind: str, path: str, answer: bytes) -> None:
    with Answerer({path: answer}) as server:
        view = foreign_store(f"{kind}://{server.address}")
        try:
            await view.start(10)
            identity = await view.joins(IDENTITY)
            origin = Origin(HASHES.data[:0] + bytes(4 * len(TOKENS)), BLOCK_TOKENS, None, None)
            async with GapMeter() as meter:
                await view.match(identity.manifest or "m", HASHES.data, origin)
        finally:
            await view.close()
    assert any(asked.startswith(path) for asked in server.asked)
    assert meter.longest_s < MOST_S


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/version", "/openapi.json", "/metrics"]
)
@pytest.mark.parametrize("shape", [*SHAPES, *MODELS, *METRICS])
async def test_pages_of_an_engine(path: str, shape: str) -> None:
    pages = {
        "/v1/models": b'{"data":[{"id":"m"}]}',
        "/v1/completions": b'{"choices":[],"usage":{"prompt_tokens":1}}',
    }
    pages[path] = (SHAPES | MODELS | METRICS)[shape](PROBE_BYTES)
    with Answerer(pages) as server:
        async with ProbeClient() as client:
            detector = EngineDetector(Families(), client.body, connector="store")
            async with GapMeter() as meter:
                with suppress(ProbeFailed):
                    await detector.identify(Engine(server.address, Role.DECODE))
    assert path in server.asked
    assert meter.longest_s < MOST_S


PODS: dict[str, Shape] = {
    "pods": many(b'{"metadata":{}}', b'{"metadata":{"resourceVersion":"1"},"items":[', b"]}"),
    "containers": many(
        b"{}", b'{"metadata":{},"items":[{"metadata":{},"spec":{"containers":[', b"]}}]}"
    ),
    "unknown members": many(b"[]", b'{"metadata":{},"items":[],"x":[', b"]}"),
}


@pytest.mark.parametrize("shape", [*PODS, *SHAPES])
async def test_kubernetes(shape: str) -> None:
    body = (PODS | SHAPES)[shape](MAX_PAGE_BYTES)
    mirror: Mirror[Pod] = Mirror(Pod, lambda pod: NOTHING, 4096)
    async with GapMeter() as meter:
        mirror.begin_list()
        with suppress(Unreadable):
            mirror.page(body)
    assert meter.longest_s < MOST_S
    event = b'{"type":"ADDED","object":%b}' % (PODS | SHAPES)[shape](MAX_LINE_BYTES - 100)
    async with GapMeter() as meter:
        mirror.begin_watch()
        with suppress(Unreadable):
            mirror.feed(event + b"\n")
    assert meter.longest_s < MOST_S
