"""Records the frames between the store's clients and its node of an earlier version.

The recording in `recorded/` was made so:

    git worktree add /tmp/earlier a918363
    python -m venv /tmp/earlier/env && /tmp/earlier/env/bin/pip install /tmp/earlier
    /tmp/earlier/env/bin/python tests/conformance/record_frames.py \\
        tests/conformance/recorded/kvstore-a918363.json

The script needs only that version's package `kvstore`. A proxy between client and node records
each frame, in the order in which frames pass. The boot id of the machine is left out.
"""

import asyncio
import base64
import hashlib
import importlib
import json
import socket
import struct
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HEADER_BYTES, HASH_BYTES, BLOCK = 32, 32, 256
PATIENCE_S = 10.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()


def kvstore(module: str) -> Any:
    return importlib.import_module(f"kvstore.{module}")


class Recorder:
    """Frames of one scenario: connection, whether the client or the node sent it, its bytes."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, str, str]] = []
        self._lock = threading.Lock()
        self._connections = 0

    def connection(self) -> int:
        with self._lock:
            self._connections += 1
            return self._connections - 1

    def add(self, connection: int, sender: str, frame: bytes) -> None:
        with self._lock:
            packed = zlib.compress(frame.replace(BOOT_ID, b"-" * len(BOOT_ID)))
            self.frames.append((connection, sender, base64.b64encode(packed).decode()))


class Proxy:
    """Takes connections at a Unix socket or a port, and hands all that comes on to the node."""

    def __init__(self, recorder: Recorder, node: str | int, here: str | int) -> None:
        self._recorder, self._node = recorder, node
        self._door = socket.socket(socket.AF_UNIX if isinstance(here, str) else socket.AF_INET)
        self._door.bind(here if isinstance(here, str) else ("127.0.0.1", here))
        self._door.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._door.getsockname()[1])

    def _accept(self) -> None:
        while True:
            client, _ = self._door.accept()
            at = self._node
            node = socket.socket(socket.AF_UNIX if isinstance(at, str) else socket.AF_INET)
            node.connect(at if isinstance(at, str) else ("127.0.0.1", at))
            number = self._recorder.connection()
            for sender, source, sink in (("client", client, node), ("node", node, client)):
                arguments = (number, sender, source, sink)
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, number: int, sender: str, source: socket.socket, sink: socket.socket) -> None:
        """Frames are written down before they are handed on: a reply follows its request."""
        whole = b""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(source, 1 << 16, 4)
            except OSError:
                data = b""
            if not data:
                break
            whole += data
            while (size := frame_bytes(whole)) and len(whole) >= size:
                self._recorder.add(number, sender, whole[:size])
                whole = whole[size:]
            socket.send_fds(sink, [data], fds) if fds else sink.sendall(data)
        sink.close()


def frame_bytes(data: bytes) -> int:
    """Bytes of the frame that `data` begins with; 0 where that is not known yet."""
    if len(data) < HEADER_BYTES:
        return 0
    body, payload = struct.unpack_from("<I4xQ", data, 16)
    return HEADER_BYTES + int(body) + int(payload)


class Scene:
    """A node of its own behind a proxy, and what a client of it needs."""

    def __init__(self, stack: ExitStack, recorder: Recorder, folder: Path) -> None:
        self.stack = stack
        path = folder / "node.sock"
        node = kvstore("_core").StoreServer(unix_path=str(path), pool_bytes=1 << 20)
        node.start()
        stack.callback(node.stop)
        self.port = Proxy(recorder, node.port, 0).port
        self.near = folder / "near.sock"
        Proxy(recorder, str(path), str(self.near))
        block = kvstore("block")
        spec = block.CacheSpec("model", "r1", "float32", 16, "sha256_cbor", "11" * 32)
        layout = block.Layout.opaque("recorded")
        parts = tuple(block.Part((0, 1), (k, k + 1), 0, BLOCK, layout) for k in range(2))
        self.whole = block.Manifest(spec, parts[:1])
        self.halves = block.Manifest(spec, parts)

    def client(self, transport: str = "tcp", **options: Any) -> Any:
        url = f"kv+unix://{self.near}" if transport != "tcp" else f"kv://127.0.0.1:{self.port}"
        client = kvstore("client").StoreClient(url, transport=transport, deadline_s=5, **options)
        self.stack.callback(client.close)
        return client


def chain(blocks: int, seed: str) -> bytes:
    return b"".join(hashlib.sha256(f"{seed} {k}".encode()).digest() for k in range(blocks))


def memory(hashes: bytes) -> Any:
    """The bytes of each block of the chain, which are a function of its hash."""
    each = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    held = bytearray(b"".join(hashlib.shake_128(one).digest(BLOCK) for one in each))
    return kvstore("_core").Segments.over(held, BLOCK, writable=True)


def put(client: Any, manifest: Any, hashes: bytes, part: int = 0) -> None:
    blocks = range(len(hashes) // HASH_BYTES)
    client.put(manifest, part, hashes, blocks, memory(hashes), list(blocks))


def get(client: Any, manifest: Any, hashes: bytes, part: int = 0) -> None:
    blocks = range(len(hashes) // HASH_BYTES)
    client.get_into(manifest, part, hashes, blocks, memory(hashes), list(blocks))


def over_tcp(scene: Scene) -> None:
    """Everything that an engine without shared memory asks for."""
    client, hashes = scene.client(name="engine"), chain(3, "tcp")
    client.register(scene.whole, "engine")
    client.match(scene.whole, hashes)
    put(client, scene.whole, hashes)
    put(client, scene.whole, hashes)
    client.match(scene.whole, hashes + chain(1, "more"))
    get(client, scene.whole, hashes + chain(1, "more"))
    put(client, scene.halves, hashes, 1)
    client.match(scene.halves, hashes)
    client.register(scene.halves, "another", "its layers differ")
    client.manifests()
    client.refusals()
    with client.acquire(scene.halves, hashes):
        client.delete(scene.whole, hashes[:HASH_BYTES])
    client.acquire(scene.whole, hashes, 0).release()
    client.wait(scene.whole, hashes, 0, 0.1, lease=True)
    client.wait(scene.whole, chain(2, "never"), 1, 0.05)
    client.stats()
    client.purge()
    client.match(scene.whole, hashes)


def refused(scene: Scene) -> None:
    """What a node says no to: an id that it does not know, RDMA that it does not have."""
    core, connection = kvstore("_core"), kvstore("connection")
    address = kvstore("address").parse_url(f"kv://127.0.0.1:{scene.port}")
    deadline = connection.Deadline(PATIENCE_S)
    for encode, *fields in (
        (core.encode_match, 99, chain(1, "refused")),
        (core.encode_attach, bytes(32)),
        (core.encode_reserve, 1, 0, None, chain(1, "refused")),
    ):
        channel = connection.Channel(address, deadline, name="refused")
        channel.link.ask(encode(channel.next_id(), *fields), deadline.at)
        channel.discard()


def vouched(scene: Scene) -> None:
    """A client whose puts are not to be checked, and one that reads what it put."""
    client, hashes = scene.client(check_puts=False), chain(2, "vouched")
    put(client, scene.whole, hashes)
    get(client, scene.whole, hashes)
    get(scene.client(), scene.whole, hashes)


def without_digests(scene: Scene) -> None:
    """A client that computes and checks no digests, and one that checks what it put."""
    client, hashes = scene.client(digest_puts=False, verify=False), chain(2, "without")
    put(client, scene.whole, hashes)
    get(client, scene.whole, hashes)


def checked_after(scene: Scene) -> None:
    """A client that checks reads what one without digests has put."""
    without_digests(scene)
    get(scene.client(), scene.whole, chain(2, "without"))


def shared_memory(scene: Scene) -> None:
    """A client that maps the pool: reserved slots, lent slots, leases of one that cannot map it."""
    client, hashes = scene.client("shm"), chain(3, "shm")
    with client.reserve(scene.whole, 0, hashes, range(2)) as reserved:
        reserved.commit(reserved.fill(memory(hashes), [0, 1]))
    with client.reserve(scene.whole, 0, hashes, range(3)):
        pass  # aborted
    put(client, scene.whole, chain(1, "lent"))
    with scene.client("unix").acquire(scene.whole, hashes) as lease:
        assert lease.blocks == 2


def asyncio_client(scene: Scene) -> None:
    """A router: landings with a lease, a wait that is given up, leases given back."""
    asyncio.run(_asyncio_client(scene))


async def _asyncio_client(scene: Scene) -> None:
    engine, hashes = scene.client(), chain(2, "landing")
    router = kvstore("aio").AsyncStoreClient(f"kv+unix://{scene.near}", name="router")
    async with router as client:
        await client.register(scene.whole)
        await client.match(scene.whole, hashes, promote=True)
        waiting = asyncio.ensure_future(client.wait(scene.whole, hashes, 2, PATIENCE_S, lease=True))
        given_up = asyncio.ensure_future(client.wait(scene.whole, chain(1, "no"), 1, PATIENCE_S))
        await client.manifests()  # both are at the node by then
        given_up.cancel()
        await asyncio.to_thread(put, engine, scene.whole, hashes)
        (await waiting).lease.release()
        (await client.acquire(scene.whole, hashes)).release()
        await client.delete(scene.whole, hashes)
        await client.purge()


SCENARIOS: tuple[Callable[[Scene], None], ...] = (
    over_tcp,
    refused,
    vouched,
    without_digests,
    checked_after,
    shared_memory,
    asyncio_client,
)


def as_json(scenarios: dict[str, list[tuple[int, str, str]]]) -> str:
    """A frame in each line."""
    parts = []
    for name, frames in scenarios.items():
        lines = ",\n".join(json.dumps(frame) for frame in frames)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def record() -> dict[str, list[tuple[int, str, str]]]:
    found = {}
    for scenario in SCENARIOS:
        recorder = Recorder()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-")))
            scenario(Scene(stack, recorder, folder))
        found[scenario.__name__] = recorder.frames
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_json(record()))
