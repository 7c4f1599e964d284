"""The HTTP side of a store node (Quart): health, metrics, stats, purge, self-test. Moves no KV.

Errors have OpenAI's shape. InfiniStore's paths are kept: POST /purge, GET /kvmap_len, /selftest.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from quart import Quart, Response, jsonify
from werkzeug.exceptions import HTTPException

from kvrouter_store.client.results import RegisteredManifest, SharingRefusal
from kvrouter_store.errors import KVStoreError
from kvrouter_store.node.http_auth import error_answer, refuse_cross_origin
from kvrouter_store.node.metrics import SHARING_REFUSED, node_metrics

__all__ = ["StatsCollector", "StoreNode", "Visitor", "create_app"]

SELFTEST_DEADLINE_S = 10.0
FLUSH_DEADLINE_S = 60.0
FLUSH_LATE = "the deadline passed"


class StoreNode(Protocol):
    """What the HTTP side needs of the server."""

    @property
    def draining(self) -> bool:
        """Whether it lets what is under way end before it leaves."""
        ...

    def stats(self) -> dict[str, int]:
        """Gauges, counters and times, named as csrc/wire/replies.h says."""
        ...

    def purge(self) -> int:
        """Drop every block that is not leased; how many went."""
        ...

    def flush_disk(self, timeout_s: float) -> tuple[str, int, int]:
        """Wait until what is committed is durable: why not, durable blocks, parts skipped."""
        ...


class Visitor(Protocol):
    """What a client of the node sees and can do. Each call takes a connection of its own."""

    def selftest(self) -> None:
        """Put, get and delete a block; raises where something is wrong."""
        ...

    def manifests(self) -> list[RegisteredManifest]:
        """What is registered, and by which living engines."""
        ...

    def refusals(self) -> list[SharingRefusal]:
        """Which living engines share nothing, and why."""
        ...


class StatsCollector:
    """What `/metrics` says: the node's stats, and which engines share nothing."""

    def __init__(self, node: StoreNode, visitor: Visitor) -> None:
        self._node = node
        self._visitor = visitor

    def collect(self) -> Iterator[Metric]:
        """Every family of kvrouter_store.node.metrics; read when scraped."""
        yield from node_metrics(self._node.stats())
        refused = GaugeMetricFamily(
            SHARING_REFUSED.name, SHARING_REFUSED.help, labels=SHARING_REFUSED.labels
        )
        with contextlib.suppress(KVStoreError):  # the other figures do not depend on it
            for refusal in self._visitor.refusals():
                refused.add_metric([refusal.engine, refusal.reason], 1)
        yield refused


def create_app(node: StoreNode, visitor: Visitor) -> Quart:
    """The app of one node."""
    app = Quart(__name__)
    registry = CollectorRegistry()
    registry.register(StatsCollector(node, visitor))

    @app.get("/healthz")
    async def healthz() -> tuple[Response, int]:
        if node.draining:
            return jsonify(status="draining"), 503
        return jsonify(status="ok"), 200

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, content_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> Response:
        return jsonify(node.stats())

    @app.get("/kvmap_len")
    async def kvmap_len() -> Response:
        return jsonify(len=node.stats()["blocks"])

    @app.get("/engines")
    async def engines() -> Response:
        manifests = await asyncio.to_thread(visitor.manifests)
        refusals = await asyncio.to_thread(visitor.refusals)
        return jsonify(
            manifests=[_described(one) for one in manifests],
            refusals=[{"engine": one.engine, "reason": one.reason} for one in refusals],
        )

    @app.get("/selftest")
    @app.get("/selftest/<int:number>")
    async def run_selftest(number: int = 1) -> Response | tuple[Response, int]:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(SELFTEST_DEADLINE_S):
                await asyncio.to_thread(visitor.selftest)
        except Exception as error:
            return error_answer(500, f"self-test failed: {error}", "selftest_failed")
        return jsonify(status="ok", number=number, seconds=time.perf_counter() - started)

    refuse_cross_origin(app)
    _act_on_blocks(app, node)
    _answer_errors(app)
    return app


def _act_on_blocks(app: Quart, node: StoreNode) -> None:
    @app.post("/purge")
    async def purge() -> Response:
        return jsonify(status="ok", num=node.purge())

    @app.post("/flush")
    async def flush() -> Response | tuple[Response, int]:
        started = time.perf_counter()
        why, durable, skipped = await asyncio.to_thread(node.flush_disk, FLUSH_DEADLINE_S)
        if why:
            status = 504 if why == FLUSH_LATE else 503
            return error_answer(status, f"not everything is durable: {why}", "flush_failed")
        seconds = time.perf_counter() - started
        return jsonify(durable_blocks=durable, skipped_parts=skipped, seconds=seconds)


def _answer_errors(app: Quart) -> None:
    @app.errorhandler(KVStoreError)
    async def store_error(error: KVStoreError) -> tuple[Response, int]:
        return error_answer(503, str(error), "store_error")

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> tuple[Response, int]:
        return error_answer(
            error.code or 500, error.description or error.name, "invalid_request_error"
        )


def _described(one: RegisteredManifest) -> dict[str, object]:
    return {
        "manifest": one.digest.hex(),
        "engines": one.engines,
        "block_bytes": one.manifest.block_bytes,
        **one.manifest.as_dict(),
    }
