"""node.py SOCKET: a store node on TCP and a Unix socket, until stdin ends. Prints its port."""

import sys

from kvrouter_store._core import StoreServer

node = StoreServer(unix_path=sys.argv[1], pool_bytes=16 << 20)
node.start()
print(node.port, flush=True)
sys.stdin.read()
node.stop()
