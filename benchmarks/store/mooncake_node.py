"""Mooncake's storage node, in its own environment: holds a segment until standard input ends.

    python -m benchmarks.store.mooncake_node HOST METADATA_URL MASTER SEGMENT_BYTES

Prints "ready 0" when the segment is mounted.
"""

import sys

from mooncake.store import MooncakeDistributedStore

LOCAL_BUFFER_BYTES = 64 << 20


def main() -> int:
    """Exit status 1 if the node cannot be set up."""
    host, metadata, master, segment = sys.argv[1:]
    store = MooncakeDistributedStore()
    failed = store.setup(host, metadata, int(segment), LOCAL_BUFFER_BYTES, "tcp", "", master)
    if failed:
        print("setup failed:", failed, file=sys.stderr)
        return 1
    print("ready 0", flush=True)
    sys.stdin.read()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
