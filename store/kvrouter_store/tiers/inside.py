"""The other end of isolated.py: a process with one tier, which answers requests on its stdin.

    python -m kvrouter_store.tiers.inside DESCRIPTOR_OF_THE_MEMORY

The first line is the tier's URL. A request is a line of JSON: number, operation, arguments; an
answer: number, result, error.
"""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any, BinaryIO

from kvrouter_store.tiers.base import Item, Memory, Tier, TierAway
from kvrouter_store.tiers.isolated import MAX_LINE_BYTES
from kvrouter_store.tiers.registry import tier_of


async def serve(memory: Memory, answers: BinaryIO) -> None:
    """Answer requests until the node is gone; then end the process, whatever still runs in it."""
    requests = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(requests)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    tier = tier_of((await requests.readline()).decode().rstrip())
    running = set()

    async def answer(line: bytes) -> None:
        number, operation, arguments = json.loads(line)
        result: Any = None
        error = None
        try:
            result = await _do(tier, memory, operation, arguments)
        except TierAway as problem:
            error = str(problem)
        except Exception as problem:
            error = repr(problem)
        answers.write(json.dumps([number, result, error]).encode() + b"\n")
        answers.flush()

    while line := await requests.readline():
        task = asyncio.create_task(answer(line))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)


async def _do(tier: Tier, memory: Memory, operation: str, arguments: list[Any]) -> Any:
    match operation:
        case "start":
            return await tier.start(memory)
        case "holds":
            return await tier.holds(arguments)
        case "load":
            return [each.value for each in await tier.load([Item(*one) for one in arguments])]
        case "store":
            return [each.value for each in await tier.store([Item(*one) for one in arguments])]
        case "drop":
            return await tier.drop(arguments)


def main(descriptor: str) -> None:
    """Serve. What clients print goes to stderr, which the node logs."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(serve(Memory.of(int(descriptor)), answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
