"""A router whose stderr nobody reads."""

import asyncio
import fcntl
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
from tests.fakes.engine import engines

COMMAND = str(Path(sys.executable).with_name("kvrouter"))
REQUESTS = 3000
"""Their lines, of some 600 bytes, are more than the router and the pipe hold."""


async def test_a_pipe_that_nobody_reads_stops_no_request() -> None:
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    async with engines(1) as [decode], aiohttp.ClientSession() as http:
        arguments = ("serve", "--port", "0", "--decode", decode.address)
        router = await asyncio.create_subprocess_exec(
            COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=theirs
        )
        os.close(theirs)
        try:
            assert router.stdout is not None
            async with asyncio.timeout(60):
                ready = (await router.stdout.readline()).decode()
                url = ready.rsplit(" ", 1)[1].strip()
                for _ in range(REQUESTS):
                    body = {"model": "m", "prompt": "Hello", "max_tokens": 4}
                    async with http.post(f"{url}/v1/completions", json=body) as answer:
                        assert answer.status == 200
                async with http.get(f"{url}/metrics") as answer:
                    page = await answer.text()
                found = re.search(r"^kvrouter:log_lines_dropped_total (\S+)$", page, re.MULTILINE)
                assert found is not None
                assert 0 < float(found[1]) < REQUESTS
                router.send_signal(signal.SIGTERM)
                assert await router.wait() == 0
        finally:
            if router.returncode is None:
                router.kill()
                await router.wait()
            os.close(ours)
