"""Server processes of the store benchmark: `python -m benchmarks.store_servers kvstore|raw ...`.

Prints one JSON line with addresses when ready; ends when its standard input ends.
"""

import argparse
import ctypes
import json
import mmap
import socket
import sys
import threading
from pathlib import Path

from kvstore._core import StoreServer

__all__ = ["library", "main"]


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["kvstore", "raw"])
    parser.add_argument("--unix-path", required=True)
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--raw-pair", default="")
    args = parser.parse_args()
    if args.kind == "kvstore":
        return _kvstore(args.unix_path, args.pool_bytes)
    return _raw(Path(args.raw_pair), args.unix_path, args.pool_bytes)


def library(path: Path) -> ctypes.CDLL:
    """The compiled raw_pair.c with its signatures."""
    lib = ctypes.CDLL(str(path))
    size, number = ctypes.c_uint64, ctypes.c_uint32
    lib.raw_serve.argtypes = [ctypes.c_int, ctypes.c_void_p, size, number, ctypes.c_int]
    for function in (lib.raw_put, lib.raw_get):
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, size, number, ctypes.c_int]
    return lib


def _kvstore(unix_path: str, pool_bytes: int) -> int:
    server = StoreServer(unix_path=unix_path, pool_bytes=pool_bytes, prefault=True)
    server.start()
    _ready(server.port)
    server.stop()
    return 0


def _raw(path: Path, unix_path: str, pool_bytes: int) -> int:
    """Each connection says first how large its slots are (u64) and whether digests are wanted."""
    lib = library(path)
    pool = mmap.mmap(-1, pool_bytes)
    for at in range(0, pool_bytes, mmap.PAGESIZE):
        pool[at] = 1
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool))

    def serve(link: socket.socket) -> None:
        hello = link.recv(9, socket.MSG_WAITALL)
        slot_bytes, with_crc = int.from_bytes(hello[:8], "little"), hello[8]
        lib.raw_serve(link.fileno(), base, slot_bytes, pool_bytes // slot_bytes, with_crc)
        link.close()

    def accept(door: socket.socket) -> None:
        while True:
            link, _ = door.accept()
            if link.family == socket.AF_INET:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(link,), daemon=True).start()

    tcp = socket.create_server(("127.0.0.1", 0))
    near = socket.socket(socket.AF_UNIX)
    near.bind(unix_path)
    near.listen()
    for door in (tcp, near):
        threading.Thread(target=accept, args=(door,), daemon=True).start()
    _ready(tcp.getsockname()[1])
    return 0


def _ready(port: int) -> None:
    print(json.dumps({"port": port}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    raise SystemExit(main())
