"""One adapter by LMCache's own loader over LMCache's own memory; run by LMCache's python.

adapter.py SOCKET: forks a process for each connection there, since importing LMCache takes long.
Each line of a connection is a JSON object with a "step" and its arguments; each answer has what
was "found", or what the step "raised". process.py is the other end.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from hashlib import sha256, shake_128
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.memory_manager import L1MemoryManager

MEMORY_BYTES = 64 << 20
LAYOUTS = {
    number: MemoryLayoutDesc(shapes=[torch.Size([2, 4, 64, 32])], dtypes=[dtype])
    for number, dtype in enumerate([torch.float32, torch.bfloat16])
}
PATIENCE_MS = 30_000


def key_of(
    number: int, salt: str = "", group: int = 0, rank: int = 0, model: str = "tiny"
) -> ObjectKey:
    """The key of a chunk."""
    chunk = sha256(f"chunk {number}".encode()).digest()
    return ObjectKey(chunk, model, ObjectKey.ComputeKVRank(2, rank, 2, rank), group, salt)


class Heard(L2AdapterListener):  # type: ignore[misc]
    """What a listener was told."""

    def __init__(self, number_of: Callable[[ObjectKey], int]) -> None:
        self._number_of = number_of
        self.told: dict[str, list[int]] = {"stored": [], "accessed": [], "deleted": []}

    def _add(self, kind: str, keys: list[ObjectKey]) -> None:
        self.told[kind] += map(self._number_of, keys)

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._add("stored", keys)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self._add("accessed", keys)

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self._add("deleted", keys)


class Steps:
    """What a test may have done."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._numbers: dict[ObjectKey, int] = {}
        self._memory = L1MemoryManager(
            L1MemoryManagerConfig(size_in_bytes=MEMORY_BYTES, use_lazy=False, shm_name="")
        )
        self._adapter: Any = None
        self._heard = Heard(self._numbers.__getitem__)

    def open(self, adapter: dict[str, Any]) -> None:
        """By LMCache's loader, as --l2-adapter does it."""
        config = PluginL2AdapterConfig.from_dict(adapter)
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._adapter = create_l2_adapter(config, self._memory.get_l1_memory_desc())
        self._adapter.register_listener(self._heard)

    def store(self, numbers: list[int], **of: Any) -> dict[str, Any]:
        keys = self._keys(numbers, **of)
        objects = self._objects(keys)
        for key, memory in zip(keys, objects, strict=True):
            bytes_of(memory)[:] = content_of(key, memory.get_size())
        task = self._adapter.submit_store_task(keys, objects)
        self._wait(self._adapter.get_store_event_fd())
        done = self._adapter.pop_completed_store_tasks()
        assert list(done) == [task]
        assert self._adapter.pop_completed_store_tasks() == {}
        self._memory.free(objects)
        return {"stored": done[task].is_successful(), "bytes": done[task].bytes_transferred()}

    def find(self, numbers: list[int], **of: Any) -> list[int]:
        keys = self._keys(numbers, **of)
        task = self._adapter.submit_lookup_and_lock_task(keys, LAYOUTS)
        self._wait(self._adapter.get_lookup_and_lock_event_fd())
        bitmap = self._adapter.query_lookup_and_lock_result(task)
        assert self._adapter.query_lookup_and_lock_result(task) is None
        return list(bitmap.gather(numbers))

    def load(self, numbers: list[int], **of: Any) -> list[int]:
        keys = self._keys(numbers, **of)
        objects = self._objects(keys)
        for memory in objects:
            bytes_of(memory)[:] = bytes(memory.get_size())
        task = self._adapter.submit_load_task(keys, objects)
        self._wait(self._adapter.get_load_event_fd())
        bitmap = self._adapter.query_load_result(task)
        assert self._adapter.query_load_result(task) is None
        for place in bitmap.get_indices_list():
            memory = objects[place]
            assert bytes_of(memory) == content_of(keys[place], memory.get_size()), "other bytes"
        self._memory.free(objects)
        return list(bitmap.gather(numbers))

    def unlock(self, numbers: list[int], **of: Any) -> None:
        self._adapter.submit_unlock(self._keys(numbers, **of))

    def delete(self, numbers: list[int], **of: Any) -> None:
        self._adapter.delete(self._keys(numbers, **of))

    def fds(self) -> list[int]:
        return [
            self._adapter.get_store_event_fd(),
            self._adapter.get_lookup_and_lock_event_fd(),
            self._adapter.get_load_event_fd(),
        ]

    def status(self) -> Any:
        return self._adapter.report_status()

    def usage(self) -> dict[str, Any]:
        usage = self._adapter.get_usage()
        return {
            "total_bytes_used": usage.total_bytes_used,
            "total_capacity_bytes": usage.total_capacity_bytes,
            "bytes_by_cache_salt": dict(usage.bytes_by_cache_salt),
            "global_eviction": self._adapter.supports_global_eviction,
        }

    def heard(self) -> dict[str, list[int]]:
        told, self._heard.told = self._heard.told, {kind: [] for kind in self._heard.told}
        return told

    def close(self) -> dict[str, Any]:
        self._adapter.close()
        self._adapter.close()
        return {
            "threads": [each.name for each in set(threading.enumerate()) - self._threads],
            "descriptors": len(os.listdir("/proc/self/fd")) - self._descriptors,
        }

    def _keys(self, numbers: list[int], **of: Any) -> list[ObjectKey]:
        keys = [key_of(number, **of) for number in numbers]
        self._numbers.update(zip(keys, numbers, strict=True))
        return keys

    def _objects(self, keys: list[ObjectKey]) -> list[Any]:
        error, objects = self._memory.allocate(LAYOUTS[keys[0].object_group_id], len(keys))
        assert error == L1Error.SUCCESS
        return list(objects)

    def _wait(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(PATIENCE_MS), "no eventfd was set"
        os.eventfd_read(fd)


def bytes_of(memory: Any) -> memoryview:
    """The bytes of a MemoryObj of LMCache, writable."""
    return memoryview(memory.byte_array).cast("B")


def content_of(key: ObjectKey, size: int) -> bytes:
    """The bytes that belong to a key."""
    return shake_128(repr(key).encode()).digest(size)


def serve(connection: socket.socket) -> None:
    """Take the steps that the connection brings, until it ends."""
    steps = Steps()
    os.dup2(connection.fileno(), 1)
    for line in connection.makefile():
        arguments = json.loads(line)
        try:
            answer = {"found": getattr(steps, arguments.pop("step"))(**arguments)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        connection.sendall(b"\n" + json.dumps(answer).encode() + b"\n")


def main(path: str) -> None:
    """Serve connections in a process each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("listening", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            status = 1
            try:
                serve(connection)
                status = 0
            finally:
                os._exit(status)
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
