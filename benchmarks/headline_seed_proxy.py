"""The proxy that kvrouter grew from: the prefill leg to its end, then the decode leg.

headline_seed_proxy.py PORT PREFILL_URL DECODE_URL. Unchanged except for the addresses (a session
for each request, chunks of 1 KiB, little error handling): headline.py compares with it.
"""

import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from quart import Quart, Response, make_response, request

TIMEOUT = aiohttp.ClientTimeout(total=6 * 60 * 60)


async def forward(url: str, data: dict[str, Any]) -> AsyncIterator[bytes]:
    """POST `data` to `url`, and yield the bytes of a 200."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
        async with session.post(url=url, json=data, headers=headers) as response:
            if response.status == 200:
                async for chunk in response.content.iter_chunked(1024):
                    yield chunk


def make_app(prefill: str, decode: str) -> Quart:
    """The proxy for one prefill and one decode engine."""
    app = Quart(__name__)

    @app.route("/v1/completions", methods=["POST"])
    async def handle_request() -> Response:
        original = await request.get_json()
        prefill_request = original.copy()
        prefill_request["max_tokens"] = 1
        async for _ in forward(f"{prefill}/v1/completions", prefill_request):
            continue
        response = await make_response(forward(f"{decode}/v1/completions", original))
        assert isinstance(response, Response)
        response.timeout = None
        return response

    return app


if __name__ == "__main__":
    make_app(sys.argv[2], sys.argv[3]).run(host="127.0.0.1", port=int(sys.argv[1]))
