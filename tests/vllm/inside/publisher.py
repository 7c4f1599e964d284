"""vLLM's own publisher of KV events, told what to publish by lines on standard input.

    python publisher.py PUB_PORT REPLAY_PORT BUFFER_STEPS

A line is JSON: {"stored": [...]}, {"removed": [...]} or {"cleared": true} publishes one batch of
one event; {"restart": true} shuts the publisher down and starts another one at the same ports.
Each line is answered by "ok": by then the batch was sent, and is kept for who asks later.
"""

import json
import socket
import sys
import time

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

PARENT = 4711


def event(told: dict[str, list[int]]) -> object:
    if "stored" in told:
        return BlockStored(
            block_hashes=told["stored"],
            parent_block_hash=PARENT,
            token_ids=[0] * 16 * len(told["stored"]),
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
    if "removed" in told:
        return BlockRemoved(block_hashes=told["removed"], medium="GPU")
    return AllBlocksCleared()


def wait_free(*ports: int) -> None:
    """ZMQ closes sockets on a thread of its own, some time after it was told to."""
    until_s = time.monotonic() + 60
    for port in ports:
        while True:
            with socket.socket() as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(("", port))
                    break
                except OSError:
                    if time.monotonic() > until_s:
                        raise
            time.sleep(0.01)


def main() -> None:
    port, replay_port, steps = sys.argv[1:]

    def make() -> ZmqEventPublisher:
        return ZmqEventPublisher(
            0, f"tcp://*:{port}", f"tcp://*:{replay_port}", buffer_steps=int(steps)
        )

    publisher = make()
    print("ok", flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if told.get("restart"):
            publisher.shutdown()
            wait_free(int(port), int(replay_port))
            publisher = make()
        else:
            publisher.publish(KVEventBatch(ts=time.time(), events=[event(told)]))
            publisher._event_queue.join()  # its thread does the rest, when it gets to it
        print("ok", flush=True)
    publisher.shutdown()


main()
