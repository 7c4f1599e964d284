"""The server of the raw C pair: `python -m benchmarks.store.raw_node LIBRARY SOCKET BYTES`.

Prints "ready PORT"; ends when its standard input ends.
"""

import ctypes
import mmap
import socket
import sys
import threading
from pathlib import Path

from benchmarks.store.contenders.raw import library, tune

HELLO_BYTES = 32


def main() -> int:
    """Serve TCP and the Unix socket, a thread for each connection."""
    lib, path, pool_bytes = library(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    pool = mmap.mmap(-1, pool_bytes)
    for at in range(0, pool_bytes, mmap.PAGESIZE):
        pool[at] = 1
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool))

    def serve(link: socket.socket) -> None:
        """Serve one connection, which begins with its slots, their size, and the digest mode."""
        hello = link.recv(HELLO_BYTES, socket.MSG_WAITALL)
        first, slots, slot_bytes, with_crc = (
            int.from_bytes(hello[at : at + 8], "little") for at in range(0, HELLO_BYTES, 8)
        )
        if len(hello) == HELLO_BYTES and (first + slots) * slot_bytes <= pool_bytes:
            lib.raw_serve(link.fileno(), base + first * slot_bytes, slot_bytes, slots, with_crc)
        link.close()

    def accept(door: socket.socket) -> None:
        while True:
            link, _ = door.accept()
            if link.family == socket.AF_INET:
                tune(link)
            threading.Thread(target=serve, args=(link,), daemon=True).start()

    tcp = socket.create_server(("127.0.0.1", 0))
    near = socket.socket(socket.AF_UNIX)
    near.bind(path)
    near.listen()
    for door in (tcp, near):
        threading.Thread(target=accept, args=(door,), daemon=True).start()
    print("ready", tcp.getsockname()[1], flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
