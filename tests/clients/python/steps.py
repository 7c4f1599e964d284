"""Runs the steps of a client, in one process as long as its user wants."""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable


def serve(*steps: Callable[[], object]) -> None:
    """For each line that names a step: run it, and print what it returns as a line of JSON.

    Steps may be coroutines; their event loop runs between them, too. Where a step raises: its
    traceback as `raised`.
    """
    asyncio.run(_serve({step.__name__: step for step in steps}))


async def _serve(steps: dict[str, Callable[[], object]]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            result = steps[line.strip()]()
            if inspect.iscoroutine(result):
                result = await result
        except Exception:
            result = {"raised": traceback.format_exc()}
        print(json.dumps(result), flush=True)
