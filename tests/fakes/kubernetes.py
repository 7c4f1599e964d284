"""An API server of Kubernetes on loopback: lists in pages, watches with bookmarks, and faults.

It keeps what its tests put, with resource versions; a real kubectl accepts it
(`tests/kubernetes/test_fake_contract.py`).
"""

import asyncio
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from tests.fakes.certificates import Authority

Json = dict[str, Any]
Mood = Literal["answers", "fails", "hangs", "refuses", "lists"]
KINDS = {"pods": ("v1", "Pod"), "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice")}
MOST_EVENTS = 1000


def server_tls(
    authority: Authority, name: str = "127.0.0.1", *, clients: bool = False
) -> ssl.SSLContext:
    """What a server shows that `authority` has signed; `clients` must show the same, if so."""
    signed = authority.sign(name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed.cert_file, signed.key_file)
    if clients:
        context.load_verify_locations(authority.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass(eq=False)
class Watch:
    """One watch in flight: its events, and when it is to end (None in its queue)."""

    kind: str
    namespace: str
    selector: str
    queue: "asyncio.Queue[Json | None]" = field(default_factory=asyncio.Queue)
    dead: bool = False  # the client gets nothing more, not even its end


class KubernetesServer:
    """Serves Pods and EndpointSlices at `url`.

    Attributes:
        mood: "fails" answers 500, "refuses" 403, "lists" 403 to watches only, "hangs" nothing;
            watches in flight go on.
        token: that it wants, as Bearer, or the whole header; None: nothing.
        bookmarks: whether watches begin and end with one.
        breaks: whether an error follows each event of a watch, in one piece with it.
        forgets: what is told 410 next: a watch by its "status" or by an "event", or a page of a
            "list" that is not the first.
        oldest: versions before it are answered 410.
        asked: path and query of every request.
        watches: those in flight.
        port: the same after `stop` and `start`.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.mood: Mood = "answers"
        self.token: str | None = None
        self.bookmarks = True
        self.breaks = False
        self.forgets: Literal["", "status", "event", "list"] = ""
        self.oldest = 0
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.watches: set[Watch] = set()
        self.port = 0
        self._tls = tls
        self._version = 100
        self._objects: dict[tuple[str, str, str], Json] = {}
        self._events: list[tuple[int, str, Json]] = []  # version, type, object
        self._snapshots: dict[str, list[Json]] = {}
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    # -- what a test does

    def put(self, kind: str, name: str, namespace: str = "test", **more: Any) -> None:
        """Make an object, or replace it."""
        key = (kind, namespace, name)
        before = self._objects.get(key)
        version, said = KINDS[kind]
        made: Json = {"apiVersion": version, "kind": said, **more}
        uid = before["metadata"]["uid"] if before else f"uid-{self._version}"
        made["metadata"] = {
            "creationTimestamp": "2025-01-01T00:00:00Z",
            **more.get("metadata", {}),
            "name": name,
            "namespace": namespace,
            "uid": uid,
        }
        self._objects[key] = made
        self._tell("MODIFIED" if before else "ADDED", made)

    def delete(self, kind: str, name: str, namespace: str = "test") -> None:
        """Remove an object; nothing if there is none."""
        gone = self._objects.pop((kind, namespace, name), None)
        if gone is not None:
            self._tell("DELETED", json.loads(json.dumps(gone)))

    def names(self, kind: str) -> list[str]:
        return [name for each, _, name in self._objects if each == kind]

    def end_watches(self) -> None:
        """End every watch in flight, as a server does after `timeoutSeconds`."""
        for watch in self.watches:
            watch.queue.put_nowait(None)

    def cut_off(self) -> None:
        """Let every watch in flight get nothing more, without a word."""
        for watch in self.watches:
            watch.dead, watch.queue = True, asyncio.Queue()

    def bookmark(self) -> None:
        """Send every watch a bookmark."""
        for watch in self.watches:
            watch.queue.put_nowait(self._bookmark(watch.kind))

    def forget(self) -> None:
        """Compact: versions until now are too old to watch from or to continue a list."""
        self._version += 1
        self.oldest = self._version
        self._snapshots.clear()

    async def until_watched(self, count: int = 1) -> None:
        """Wait until so many watches are in flight."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: len(self.watches) >= count)

    async def until_asked(self, more: int = 1) -> None:
        """Wait until so many more requests came."""
        wanted = len(self.asked) + more
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: len(self.asked) >= wanted)

    async def start(self) -> None:
        """Serve. Idempotent."""
        if self._runner is not None:
            return
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/{kind}", self._collection)
        app.router.add_get(
            "/apis/discovery.k8s.io/v1/namespaces/{namespace}/{kind}", self._collection
        )
        app.router.add_get("/api/v1/namespaces/{namespace}/{kind}/{name}", self._one)
        for path, body in _discovery():
            app.router.add_get(path, _says(body))
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True
        )
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        """Close its port and every connection. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.end_watches()
            await runner.cleanup()

    # -- what clients see

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        async with self._changed:
            self.asked.append((request.path, query))
            self._changed.notify_all()
        if (fault := await self._fault(request)) is not None:
            return fault
        if query.get("watch") in ("1", "true"):
            return await self._watch(request, query)
        return self._list(request, query)

    async def _one(self, request: web.Request) -> web.StreamResponse:
        info = request.match_info
        found = self._objects.get((info["kind"], info["namespace"], info["name"]))
        return web.json_response(found) if found else _status(404, "NotFound", "not found")

    async def _fault(self, request: web.Request) -> web.Response | None:
        if self.mood == "hangs":
            await asyncio.Event().wait()
        if self.mood == "fails":
            return _status(500, "InternalError", "etcdserver: request timed out")
        if self.mood == "refuses" or (self.mood == "lists" and "watch" in request.query):
            kind = request.match_info["kind"]
            return _status(403, "Forbidden", f"{kind} is forbidden: User cannot list resource")
        shown = request.headers.get("Authorization")
        if self.token and shown not in (self.token, f"Bearer {self.token}"):
            return _status(401, "Unauthorized", "Unauthorized")
        return None

    def _list(self, request: web.Request, query: dict[str, str]) -> web.Response:
        kind, namespace = request.match_info["kind"], request.match_info["namespace"]
        token, start = query.get("continue", ""), 0
        if token:
            snapshot, _, place = token.partition("_")
            if snapshot not in self._snapshots or self.forgets == "list":
                self.forgets = ""
                message = "The provided continue parameter is too old"
                return _status(410, "Expired", message)
            items, version, start = self._snapshots[snapshot], snapshot, int(place)
        else:
            items = list(self._selected(kind, namespace, query.get("labelSelector", "")))
            version = str(self._version)
        end = start + int(query.get("limit") or len(items) or 1)
        metadata: Json = {"resourceVersion": version}
        if end < len(items):
            self._snapshots[version] = items
            metadata |= {"continue": f"{version}_{end}", "remainingItemCount": len(items) - end}
        said = {"apiVersion": KINDS[kind][0], "kind": f"{KINDS[kind][1]}List"}
        return web.json_response({**said, "metadata": metadata, "items": items[start:end]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        since = int(query.get("resourceVersion") or 0)
        forgets, self.forgets = self.forgets, ""
        expired = forgets == "event" or since < self.oldest
        if forgets == "status":
            return _status(410, "Expired", "too old resource version")
        info = request.match_info
        watch = Watch(info["kind"], info["namespace"], query.get("labelSelector", ""))
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        if expired:
            await _send(
                answer, {"type": "ERROR", "object": _status_body(410, "Expired", "too old")}
            )
            return answer
        for version, type_, seen in self._events:
            if version > since:
                self._offer(watch, type_, seen)
        await self._begin(watch)
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds") or 300)):
                broken = {"type": "ERROR", "object": _status_body(500, "InternalError", "broken")}
                while (event := await watch.queue.get()) is not None:
                    await _send(answer, event, *([broken] if self.breaks else []))
        except TimeoutError:
            if watch.dead:
                await asyncio.Event().wait()
        finally:
            self.watches.discard(watch)
        if self.bookmarks and query.get("allowWatchBookmarks") in ("1", "true"):
            await _send(answer, self._bookmark(watch.kind))
        return answer

    async def _begin(self, watch: Watch) -> None:
        self.watches.add(watch)
        async with self._changed:
            self._changed.notify_all()

    def _selected(self, kind: str, namespace: str, selector: str) -> Iterator[Json]:
        for (each, where, _), found in self._objects.items():
            if (each, where) == (kind, namespace) and matches(selector, found):
                yield found

    def _tell(self, type_: str, seen: Json) -> None:
        self._version += 1
        seen["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, type_, seen))
        if len(self._events) > MOST_EVENTS:
            self.oldest = max(self.oldest, self._events.pop(0)[0])
        for watch in self.watches:
            self._offer(watch, type_, seen)

    def _offer(self, watch: Watch, type_: str, seen: Json) -> None:
        kind = next(kind for kind, (_, said) in KINDS.items() if said == seen["kind"])
        place = (kind, seen["metadata"]["namespace"])
        if place != (watch.kind, watch.namespace):
            return
        if not matches(watch.selector, seen):
            type_ = "DELETED"  # to this watch it may have matched before
        watch.queue.put_nowait({"type": type_, "object": seen})

    def _bookmark(self, kind: str) -> Json:
        version, said = KINDS[kind]
        metadata = {"resourceVersion": str(self._version)}
        return {
            "type": "BOOKMARK",
            "object": {"apiVersion": version, "kind": said, "metadata": metadata},
        }


def matches(selector: str, found: Json) -> bool:
    """Whether its labels fit `a=b,c!=d,e`."""
    labels = found["metadata"].get("labels", {})
    for part in filter(None, selector.split(",")):
        name, unequal, value = part.partition("!=")
        if unequal:
            if labels.get(name) == value:
                return False
            continue
        name, equal, value = part.replace("==", "=").partition("=")
        if name not in labels or (equal and labels[name] != value):
            return False
    return True


def _status_body(code: int, reason: str, message: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status_body(code, reason, message), status=code)


async def _send(answer: web.StreamResponse, *events: Json) -> None:
    await answer.write(b"".join(json.dumps(event).encode() + b"\n" for event in events))


def _says(body: Json) -> Any:
    async def handle(request: web.Request) -> web.Response:
        del request
        return web.json_response(body)

    return handle


def _discovery() -> Iterator[tuple[str, Json]]:
    """What kubectl asks first: which kinds there are."""
    verbs = ["get", "list", "watch"]
    yield "/api", {"kind": "APIVersions", "versions": ["v1"]}
    group = {"groupVersion": "discovery.k8s.io/v1", "version": "v1"}
    named = {"name": "discovery.k8s.io", "versions": [group], "preferredVersion": group}
    yield "/apis", {"kind": "APIGroupList", "apiVersion": "v1", "groups": [named]}
    for path, version, kind, resource in (
        ("/api/v1", "v1", "Pod", "pods"),
        ("/apis/discovery.k8s.io/v1", "discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
    ):
        yield (
            path,
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": [
                    {
                        "name": resource,
                        "singularName": kind.lower(),
                        "namespaced": True,
                        "kind": kind,
                        "verbs": verbs,
                    }
                ],
            },
        )
