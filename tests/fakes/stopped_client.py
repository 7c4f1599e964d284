"""A client that reserves blocks, and writes and commits them only when it is told to.

python -m tests.fakes.stopped_client URL SEED BLOCKS

Prints the statuses of the reserved blocks. After a line on stdin it fills their slots with bytes
that nobody may see, commits, and prints the statuses of that. It ends when stdin ends.
"""

import sys

from tests.fakes.store import Memory, chain_of, manifest_of

from kvrouter_store.client.blocking import StoreClient

BLOCK = 4096
MANIFEST = manifest_of(BLOCK)


def main() -> None:
    url, seed, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    client = StoreClient(url, transport="shm")
    reservation = client.reserve(MANIFEST, 0, chain_of(blocks, seed), range(blocks))
    print(*(int(status) for status in reservation.statuses), flush=True)
    sys.stdin.readline()
    wrong = Memory(1, BLOCK)
    wrong[0] = b"\xee" * BLOCK
    crcs = reservation.fill(wrong.segments, [0] * reservation.granted)
    print(*(int(status) for status in reservation.commit(crcs)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
