"""A client that leases one chain, reserves blocks of another, and stops for its parent to kill it.

python -m tests.fakes.holding_client URL LEASED RESERVED FIRST COUNT

LEASED and RESERVED are seeds of chains. Prints the number of leased blocks and the statuses of the
reserved ones.
"""

import signal
import sys

from tests.fakes.whole_store import CHAINS, MANIFEST

from kvrouter_store.client.blocking import StoreClient


def main() -> None:
    url, leased, reserved, first, count = sys.argv[1:]
    client = StoreClient(url, transport="shm")
    lease = client.acquire(MANIFEST, CHAINS[leased])
    span = range(int(first), int(first) + int(count))
    reservation = client.reserve(MANIFEST, 0, CHAINS[reserved], span)
    print(lease.blocks, *(int(status) for status in reservation.statuses), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
