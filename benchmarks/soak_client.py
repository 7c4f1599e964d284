"""One client of the soak: random operations, every byte checked, until SIGTERM or SIGKILL.

python -m benchmarks.soak_client URL TRANSPORT SEED TALLY

TALLY is a file that is replaced about once a second, with operations, errors by kind, wrong bytes.
"""

import json
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tests.fakes.busy_client import BusyClient

from kvrouter_store.errors import KVStoreError

CHAINS = 200  # three times what the pool of the soak holds
TELL_EVERY_S = 1.0


def main() -> None:
    """Work, and keep the tally file up to date."""
    url, transport, seed, file = sys.argv[1:]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    client, done = BusyClient(url, transport, int(seed), CHAINS), Counter[str]()
    told_at, told_wrong = time.monotonic(), 0
    while not over.is_set():
        try:
            done[client.once()] += 1
        except KVStoreError as error:
            done[f"error {type(error).__name__}"] += 1
        if time.monotonic() > told_at + TELL_EVERY_S or client.wrong > told_wrong:
            told_at, told_wrong = time.monotonic(), client.wrong
            write_tally(Path(file), done, client.wrong)
    write_tally(Path(file), done, client.wrong)


def write_tally(file: Path, done: Counter[str], wrong: int) -> None:
    """Replace the tally atomically."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"done": done, "wrong": wrong}))
    fresh.replace(file)


if __name__ == "__main__":
    main()
