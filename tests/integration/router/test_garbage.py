"""What a request held is gone when it is over, without the collector: bodies hang on it."""

import asyncio
import gc
from collections import Counter

import pytest
from tests.integration.router.conftest import Json, Open, Site, text

OF_A_REQUEST = frozenset(
    {
        "Exchange",
        "RequestContext",
        "Request",
        "EngineResponse",
        "Relay",
        "_ShareStream",
        "Gathering",
    }
)


def living() -> Counter[str]:
    """How many objects of requests there are."""
    names = (type(each).__name__ for each in gc.get_objects())
    return Counter(name for name in names if name in OF_A_REQUEST)


async def ask(here: Site, body: Json | bytes, *, leaves: bool) -> None:
    if not leaves:
        await here.post(body)
        return
    asking = asyncio.create_task(here.post(body))
    await here.decode[0].next_began()
    asking.cancel()
    await here.decode[0].next_left()


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        (text(), "ok"),
        (text(stream=True), "ok"),
        (text(prompt=["a", "b"]), "ok"),
        (text(prompt=["a", "b"], stream=True), "ok"),
        (text(n=3, stream=True), "ok"),
        (text(model="none"), "ok"),
        (b"{", "ok"),
        (text(), "500"),
        (text(stream=True), "drop"),
        (text(stream=True), "drop_mid"),
        (text(prompt=["a", "b"], stream=True), "drop_mid"),
        (text(), "hang"),
        (text(stream=True), "hang_mid"),
    ],
)
async def test_a_request_leaves_nothing(site: Open, body: Json | bytes, mode: str) -> None:
    here = await site()
    here.decode[0].mode = mode
    gc.freeze()  # what was there before does not count
    gc.disable()
    try:
        await ask(here, body, leaves=mode.startswith("hang"))
        async with asyncio.timeout(5):
            while living():
                here.app.core.metrics.settle()  # what is counted together is held until then
                await asyncio.sleep(0)
    finally:
        gc.enable()
        gc.unfreeze()
        here.decode[0].mode = "ok"
