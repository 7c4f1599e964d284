"""The HTTP side of a store node: health, metrics, stats, purge, self-test. Moves no KV.

A function of requests; who runs a node brings the server. Errors have OpenAI's shape. InfiniStore's
paths are kept: POST /purge, GET /kvmap_len, /selftest. A node with tokens serves only requests with
one of them as `Authorization: Bearer`. Pages of other sites in a browser can change nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrouter_store._core import StoreServer
from kvrouter_store.client.results import RegisteredManifest
from kvrouter_store.connection.cross_origin import cross_origin_refusal
from kvrouter_store.connection.tokens import bearer_token
from kvrouter_store.errors import KVStoreError
from kvrouter_store.node.metrics import SHARING_REFUSED, node_metrics, tier_metrics
from kvrouter_store.node.own_client import OwnClient
from kvrouter_store.tiers.guard import Guard

# These show only that the process serves; a supervisor has no token.
OPEN_PATHS = frozenset({"/healthz"})
SELFTEST_DEADLINE_S = 10.0
FLUSH_DEADLINE_S = 60.0
FLUSH_LATE = "the deadline passed"


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


Respond = Callable[[str, str, Mapping[str, str]], Awaitable[Answer]]
"""Answers a request by its method, its path and its headers, whose names are in lower case."""
Endpoint = Callable[[str], Awaitable[Answer]]
"""Answers a request of the tenant with this token; "": the node has no tenants."""


class StatsCollector:
    """What `/metrics` shows: the node's stats, its tiers, and which engines share nothing."""

    def __init__(self, server: StoreServer, client: OwnClient, tiers: Sequence[Guard] = ()) -> None:
        self._server = server
        self._client = client
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        """Every family of kvrouter_store.node.metrics; read when scraped."""
        yield from node_metrics(self._server.stats())
        yield from tier_metrics(self._tiers)
        refused = SHARING_REFUSED.empty()
        with contextlib.suppress(KVStoreError):  # the other figures do not depend on it
            for refusal in self._client.refusals():
                labels = {"engine": refusal.engine, "reason": refusal.reason}
                refused.add_sample(SHARING_REFUSED.name, labels, 1)
        yield refused


class HttpApi:
    """Answers for one running node; with `tenants`, for the caller's own blocks alone."""

    def __init__(
        self,
        server: StoreServer,
        client: OwnClient,
        *,
        tenants: bool = False,
        tiers: Sequence[Guard] = (),
    ) -> None:
        self._server = server
        self._client = client
        self._tenants = tenants
        self._tiers = tiers
        self._endpoints: dict[str, tuple[str, Endpoint]] = {
            "/metrics": ("GET", self._metrics),
            "/healthz": ("GET", self._healthz),
            "/stats": ("GET", self._stats),
            "/kvmap_len": ("GET", self._kvmap_len),
            "/engines": ("GET", self._engines),
            "/selftest": ("GET", self._selftest),
            "/purge": ("POST", self._purge),
            "/flush": ("POST", self._flush),
        }

    async def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """See `Respond`. The answer to a HEAD is that to a GET."""
        if why := cross_origin_refusal(method, headers):
            return _error(403, why, "forbidden")
        token = bearer_token(headers.get("authorization", ""))
        if path not in OPEN_PATHS and not self._server.admits(token):
            message = "this node needs a token: send it as Authorization: Bearer TOKEN"
            challenge = (("www-authenticate", 'Bearer realm="kvstore"'),)
            return _error(401, message, "unauthorized")._replace(headers=challenge)
        allowed, endpoint = self._find(path)
        if endpoint is None:
            return _error(404, f"there is no {path[:200]} here", "invalid_request_error")
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            refusal = _error(405, f"{path} takes {allowed} alone", "invalid_request_error")
            return refusal._replace(headers=(("allow", allowed),))
        try:
            return await endpoint(token if self._tenants else "")
        except KVStoreError as error:
            return _error(503, str(error), "store_error")

    def _find(self, path: str) -> tuple[str, Endpoint | None]:
        """The method of a path and what answers there, if anything does."""
        above, _, number = path.rpartition("/")
        if above == "/selftest" and number.isdecimal() and len(number) < 10:
            return "GET", partial(self._selftest, number=int(number))
        return self._endpoints.get(path, ("", None))

    async def _metrics(self, token: str) -> Answer:
        registry = CollectorRegistry()
        registry.register(StatsCollector(self._server, self._client.on_behalf(token), self._tiers))
        text = await asyncio.to_thread(generate_latest, registry)
        return Answer(200, text, CONTENT_TYPE_LATEST)

    async def _healthz(self, _: str) -> Answer:
        if self._server.draining:
            return _as_json(503, status="draining")
        return _as_json(200, status="ok")

    async def _stats(self, _: str) -> Answer:
        return _as_json(200, **self._server.stats())

    async def _kvmap_len(self, _: str) -> Answer:
        return _as_json(200, len=self._server.stats()["blocks"])

    async def _engines(self, token: str) -> Answer:
        client = self._client.on_behalf(token)
        manifests = await asyncio.to_thread(client.manifests)
        refusals = await asyncio.to_thread(client.refusals)
        return _as_json(
            200,
            manifests=[_described(one) for one in manifests],
            refusals=[{"engine": one.engine, "reason": one.reason} for one in refusals],
        )

    async def _selftest(self, token: str, number: int = 1) -> Answer:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(SELFTEST_DEADLINE_S):
                await asyncio.to_thread(self._client.on_behalf(token).selftest)
        except Exception as error:
            return _error(500, f"self-test failed: {error}", "selftest_failed")
        seconds = time.perf_counter() - started
        return _as_json(200, status="ok", number=number, seconds=seconds)

    async def _purge(self, token: str) -> Answer:
        return _as_json(200, status="ok", num=self._server.purge(token if self._tenants else None))

    async def _flush(self, _: str) -> Answer:
        started = time.perf_counter()
        why, durable, skipped = await asyncio.to_thread(self._server.flush_disk, FLUSH_DEADLINE_S)
        if why:
            status = 504 if why == FLUSH_LATE else 503
            return _error(status, f"not everything is durable: {why}", "flush_failed")
        seconds = time.perf_counter() - started
        return _as_json(200, durable_blocks=durable, skipped_parts=skipped, seconds=seconds)


def _as_json(status: int, /, **members: Any) -> Answer:
    return Answer(status, orjson.dumps(members, option=orjson.OPT_APPEND_NEWLINE))


def _error(status: int, message: str, kind: str) -> Answer:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return _as_json(status, error=error)


def _described(one: RegisteredManifest) -> dict[str, object]:
    return {
        "manifest": one.digest.hex(),
        "engines": one.engines,
        "block_bytes": one.manifest.block_bytes,
        **one.manifest.as_dict(),
    }
