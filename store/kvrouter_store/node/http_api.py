"""The HTTP side of a store node (Quart): health, metrics, stats, purge, self-test. Moves no KV.

Errors have OpenAI's shape. InfiniStore's paths are kept: POST /purge, GET /kvmap_len, /selftest.
A node with tokens serves only requests with one of them as `Authorization: Bearer`. Pages of other
sites in a browser can change nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from quart import Quart, Response, has_request_context, jsonify, request
from werkzeug.exceptions import HTTPException

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
Answer = Response | tuple[Response, int]


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
        refused = GaugeMetricFamily(
            SHARING_REFUSED.name, SHARING_REFUSED.help, labels=SHARING_REFUSED.labels
        )
        with contextlib.suppress(KVStoreError):  # the other figures do not depend on it
            for refusal in self._client.refusals():
                refused.add_metric([refusal.engine, refusal.reason], 1)
        yield refused


def bearer() -> str:
    """The token that came with the HTTP request being served; '' without one."""
    if not has_request_context():
        return ""
    return bearer_token(request.headers.get("Authorization", ""))


def create_app(
    server: StoreServer, client: OwnClient, *, tenants: bool = False, tiers: Sequence[Guard] = ()
) -> Quart:
    """The app of one running node; with `tenants`, a purge is of the caller's own blocks."""
    app = Quart(__name__)
    _guard(app, server)
    _observe(app, server, StatsCollector(server, client, tiers))
    _ask_the_node(app, client)
    _act_on_blocks(app, server, tenants)
    _answer_errors(app)
    return app


def _guard(app: Quart, server: StoreServer) -> None:
    @app.before_request
    async def check() -> Answer | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        why = cross_origin_refusal(request.method, headers)
        if why:
            return _error(403, why, "forbidden")
        if request.path in OPEN_PATHS or server.admits(bearer()):
            return None
        message = "this node needs a token: send it as Authorization: Bearer TOKEN"
        answer, status = _error(401, message, "unauthorized")
        answer.headers["WWW-Authenticate"] = 'Bearer realm="kvstore"'
        return answer, status


def _observe(app: Quart, server: StoreServer, collector: StatsCollector) -> None:
    registry = CollectorRegistry()
    registry.register(collector)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, content_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def healthz() -> Answer:
        if server.draining:
            return jsonify(status="draining"), 503
        return jsonify(status="ok"), 200

    @app.get("/stats")
    async def stats() -> Response:
        return jsonify(server.stats())

    @app.get("/kvmap_len")
    async def kvmap_len() -> Response:
        return jsonify(len=server.stats()["blocks"])


def _ask_the_node(app: Quart, client: OwnClient) -> None:
    @app.get("/engines")
    async def engines() -> Response:
        manifests = await asyncio.to_thread(client.manifests)
        refusals = await asyncio.to_thread(client.refusals)
        return jsonify(
            manifests=[_described(one) for one in manifests],
            refusals=[{"engine": one.engine, "reason": one.reason} for one in refusals],
        )

    @app.get("/selftest")
    @app.get("/selftest/<int:number>")
    async def selftest(number: int = 1) -> Answer:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(SELFTEST_DEADLINE_S):
                await asyncio.to_thread(client.selftest)
        except Exception as error:
            return _error(500, f"self-test failed: {error}", "selftest_failed")
        return jsonify(status="ok", number=number, seconds=time.perf_counter() - started)


def _act_on_blocks(app: Quart, server: StoreServer, tenants: bool) -> None:
    @app.post("/purge")
    async def purge() -> Response:
        return jsonify(status="ok", num=server.purge(bearer() if tenants else None))

    @app.post("/flush")
    async def flush() -> Answer:
        started = time.perf_counter()
        why, durable, skipped = await asyncio.to_thread(server.flush_disk, FLUSH_DEADLINE_S)
        if why:
            status = 504 if why == FLUSH_LATE else 503
            return _error(status, f"not everything is durable: {why}", "flush_failed")
        seconds = time.perf_counter() - started
        return jsonify(durable_blocks=durable, skipped_parts=skipped, seconds=seconds)


def _answer_errors(app: Quart) -> None:
    @app.errorhandler(KVStoreError)
    async def store_error(error: KVStoreError) -> Answer:
        return _error(503, str(error), "store_error")

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Answer:
        return _error(error.code or 500, error.description or error.name, "invalid_request_error")


def _error(status: int, message: str, kind: str) -> tuple[Response, int]:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return jsonify(error=error), status


def _described(one: RegisteredManifest) -> dict[str, object]:
    return {
        "manifest": one.digest.hex(),
        "engines": one.engines,
        "block_bytes": one.manifest.block_bytes,
        **one.manifest.as_dict(),
    }
