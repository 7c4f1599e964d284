"""Engines' connections to the store: which are missing, and time for those to be made.

An engine that started before its store pauses between its tries, up to a second, and may try only
when it has KV to save or to load.
"""

from __future__ import annotations

import asyncio
from random import SystemRandom
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.openai.endpoints import COMPLETIONS
from kvrouter.tools.doctor.store_facts import connected_engines, open_clients
from kvrouter_store.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvrouter.tools.doctor.base import Setup
    from kvrouter.tools.doctor.engine_facts import EngineFacts

LINKS_S: Final = 5.0
"""How long all engines together may take to connect."""
PAUSE_S: Final = 0.2
"""Between two prompts to an engine that is not connected."""
UNKNOWN_BLOCK_TOKENS: Final = 64


def unconnected(
    engines: Iterable[EngineFacts], connected: Mapping[str, frozenset[str]]
) -> Iterator[tuple[str, list[EngineFacts], list[EngineFacts]]]:
    """Each manifest that more engines need than are connected with it, and these engines.

    Yields:
        the manifest's hex digest, all engines that need it, and those that are missing: all if the
        store's names do not say which.
    """
    needing: dict[str, list[EngineFacts]] = {}
    for each in engines:
        if each.engine.manifest is not None:
            needing.setdefault(each.engine.manifest, []).append(each)
    for manifest, group in needing.items():
        names = connected.get(manifest, frozenset())
        if len(names) < len(group):
            missing = [each for each in group if each.engine.address not in names]
            yield manifest, group, missing or group


async def await_links(setup: Setup) -> None:
    """Return when every engine that needs the store is connected to it, or after LINKS_S.

    Sends engines that are not connected short prompts, for which they have to ask the store.
    """
    engines = await setup.generating_engines()
    try:
        async with asyncio.timeout(LINKS_S), open_clients(setup) as stores:
            while True:
                listed = [each for s in stores.values() for each in await s.manifests()]
                connected = connected_engines(listed)
                missing = [e for _, _, some in unconnected(engines, connected) for e in some]
                if not missing:
                    return
                await asyncio.gather(*(ask_new_prompt(setup, each) for each in missing))
                await asyncio.sleep(PAUSE_S)
    except (KVStoreError, TimeoutError):
        return  # checks report a store that fails, and engines that do not connect


async def ask_new_prompt(setup: Setup, facts: EngineFacts) -> None:
    """Let an engine compute two blocks that it cannot have. Never raises for what it does."""
    draw = SystemRandom()
    size = 2 * (facts.block_tokens or UNKNOWN_BLOCK_TOKENS)
    prompt = [draw.randrange(100, 1000) for _ in range(size)]
    body = {"model": facts.models[0], "prompt": prompt, "max_tokens": 1, "temperature": 0}
    await setup.ask(facts.engine, COMPLETIONS, orjson.dumps(body))
