"""Trials: a prompt of a few blocks through a prefill engine, the store and a decode engine.

A prompt consists of random words, so that no engine holds its KV. Its blocks are deleted later.

An engine that started before its store pauses between its tries to connect, up to a second, and may
try only when it has KV to save or to load: short prompts come first.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import product
from random import SystemRandom
from string import ascii_lowercase
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.canary.verdict import Difference, first_difference, margin, tokens_of
from kvrouter.engines.compatibility import shares
from kvrouter.engines.engine import HashDomain, Role
from kvrouter.engines.families.base import BadAnswer, Handoff, KvSource, LegOrder
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.openai.endpoints import COMPLETIONS
from kvrouter.openai.request import parse
from kvrouter.prefix.index import block_ids
from kvrouter.tools.doctor.base import Found, Setup, error
from kvrouter.tools.doctor.store import DEADLINE_S, NAME, TRIAL_BLOCKS, connected_engines
from kvrouter.tools.doctor.tokenizers import token_ids
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvrouter.tools.doctor.engines import EngineFacts
    from kvrouter_store.identity.block import Manifest

LINKS_S: Final = 5.0  # how long all engines together may take to connect to the store
PAUSE_S: Final = 0.2  # between two prompts to an engine that is not connected
UNKNOWN_BLOCK_TOKENS: Final = 64
ANSWER_TOKENS: Final = 8
_HITS: Final = re.compile(rb"^vllm:external_prefix_cache_hits_total\{[^}\n]*\} (\S+)", re.M)
_PRODUCER: Final = (
    'give its --kv-transfer-config the kv_role "kv_producer" or "kv_both" (for `kvrouter sim`: '
    "--role prefill), or name it under --decode alone"
)
_CONSUMER: Final = (
    'give its --kv-transfer-config the kv_role "kv_consumer" or "kv_both" (for `kvrouter sim`: '
    "--role decode) and the url of this store, and look in its log for loads that failed"
)


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


async def ask_new_prompt(setup: Setup, facts: EngineFacts) -> None:
    """Let an engine compute two blocks that it cannot have. Never raises for what it does."""
    prompt = _random_ids(2 * (facts.identity.block_tokens or UNKNOWN_BLOCK_TOKENS))
    body = {"model": facts.identity.models[0], "prompt": prompt, "max_tokens": 1, "temperature": 0}
    await setup.ask(facts.engine, COMPLETIONS, orjson.dumps(body))


def _random_ids(size: int) -> list[int]:
    draw = SystemRandom()
    return [draw.randrange(100, 1000) for _ in range(size)]


async def try_pairs(setup: Setup) -> list[Trial]:
    """A trial of as many pairs as are needed for every engine to take part.

    Not of engines whose node of the store cannot be used, or knows no manifest of theirs.
    """
    settings = setup.settings
    token, tls = settings.store_token.get_secret_value(), settings.store_tls
    async with AsyncExitStack() as stack:
        nodes = {
            each.url: await stack.enter_async_context(
                AsyncStoreClient(each.url, name=NAME, token=token, tls=tls, deadline_s=DEADLINE_S)
            )
            for each in setup.usable_stores
        }
        await _await_links(setup, nodes.values())
        only = next(iter(nodes.values()), None) if len(settings.store) == 1 else None
        pairs = pairs_to_try(setup, setup.known_engines)
        homes = [(only or nodes.get(pair[0].engine.node or ""), pair) for pair in pairs]
        trials = [Trial(setup, home, *pair) for home, pair in homes if home is not None]
        await asyncio.gather(*(trial.run() for trial in trials))
    return [each for each in trials if each.stopped or each.manifest is not None]


async def _await_links(setup: Setup, nodes: Iterable[AsyncStoreClient]) -> None:
    """Return when every engine that needs the store is connected to it, or after LINKS_S.

    Checks report a store that fails meanwhile, and engines that do not connect.
    """
    engines = setup.generating_engines
    with suppress(KVStoreError, TimeoutError):
        async with asyncio.timeout(LINKS_S):
            while True:
                connected = connected_engines([m for node in nodes for m in await node.manifests()])
                missing = [e for _, _, some in unconnected(engines, connected) for e in some]
                if not missing:
                    return
                await asyncio.gather(*(ask_new_prompt(setup, each) for each in missing))
                await asyncio.sleep(PAUSE_S)


def pairs_to_try(
    setup: Setup, known: Sequence[EngineFacts]
) -> Iterator[tuple[EngineFacts, EngineFacts]]:
    """Engines that can share KV through the store, each at least once if it has a partner."""
    able = [each for each in known if setup.families.of(each.engine).order is LegOrder.STORE]
    pairs = [pair for pair in product(able, able) if _can_share(*pair)]
    prefill, decode = set[str](), set[str]()
    for untried in (2, 1):  # engines of a pair: those that both are new come first
        for one, other in pairs:
            if (one.name not in prefill) + (other.name not in decode) >= untried:
                prefill.add(one.name)
                decode.add(other.name)
                yield one, other


def _can_share(prefill: EngineFacts, decode: EngineFacts) -> bool:
    one, other = prefill.engine, decode.engine
    return (
        one is not other
        and one.role.serves(Role.PREFILL)
        and other.role.serves(Role.DECODE)
        and not set(prefill.identity.models).isdisjoint(decode.identity.models)
        and prefill.identity.domain is not None
        and one.manifest is not None
        and other.manifest is not None
        and shares(one, other)
    )


@dataclass(slots=True)
class Trial:
    """A prompt through one prefill and one decode engine, and what came of it."""

    setup: Setup
    store: AsyncStoreClient  # the node that the prefill engine writes to
    prefill: EngineFacts
    decode: EngineFacts
    stopped: str = ""  # the problem that ended it, in a sentence; later attributes are then unset
    at_fault: str = ""  # the engine that caused the problem, or both
    # The prefill engine's, as the store knows it; None if it does not.
    manifest: Manifest | None = None
    hashes: bytes = b""  # names of the prompt's blocks
    blocks: int = 0  # whole blocks of the prompt
    promised: int = 0  # how many of them the prefill engine said it would store
    landed: int = 0  # how many of them were in the store in time
    needed_tokens: int = 0  # tokens of the prompt that could be loaded
    loaded_tokens: int | None = None  # what the decode engine loaded or had; None if unknown
    # Where its answer differs from that of the prefill engine alone, or None.
    difference: Difference | None = None
    # By how much one of both tokens is likelier there, in logarithms; None if unknown.
    margin: float | None = None

    @property
    def names(self) -> str:
        """Both engines, as findings name them."""
        return f"{self.prefill.name}, {self.decode.name}"

    @property
    def _domain(self) -> HashDomain:
        domain = self.prefill.identity.domain
        assert domain is not None  # see _can_share
        return domain

    async def run(self) -> None:
        """Send the prompt. Never raises for what engines and store do."""
        try:
            await self._run()
        except (ProbeFailed, BadAnswer) as problem:
            self.stopped = str(problem)
        except KVStoreError as problem:
            self.stopped, self.at_fault = f"the store: {problem}", self.names
        finally:
            if self.manifest is not None:
                with suppress(KVStoreError):  # it evicts blocks first that no client asks for
                    await self.store.delete(self.manifest, self.hashes)

    async def _run(self) -> None:
        body = await self._body()
        family = self.setup.families.of(self.prefill.engine)
        leg = family.prefill_body(parse(body, "completion", 1))
        handoff = family.read_prefill_answer(await self._ask(self.prefill, leg))
        digest, known = self.prefill.engine.manifest, await self.store.manifests()
        self.manifest = next((one.manifest for one in known if one.digest.hex() == digest), None)
        if self.manifest is None:
            return
        self.promised = min(handoff.blocks, self.blocks)
        if self.promised:
            timeout_s = self.setup.settings.landing_timeout_s
            landing = await self.store.wait(self.manifest, self.hashes, self.promised, timeout_s)
            self.landed = self.promised if landing.landed else landing.blocks
        decoded = await self._decode(body, handoff)
        alone = tokens_of(await self._ask(self.prefill, body))
        if decoded and alone:
            self.difference = first_difference(decoded, alone)
        if self.difference is not None:
            self.margin = await self._margin(body, self.difference)

    async def _body(self) -> bytes:
        """A completion of a few tokens after a prompt of TRIAL_BLOCKS blocks and one token."""
        block_tokens, decode = self._domain.block_tokens, self.decode.identity
        size = TRIAL_BLOCKS * block_tokens + 1
        if decode.max_model_len:
            size = min(size, decode.max_model_len - ANSWER_TOKENS)
        model = next(model for model in decode.models if model in self.prefill.identity.models)
        draw = SystemRandom()
        words = ("".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in range(size))
        given = {"model": model, "prompt": " ".join(words)}
        ids = list(await token_ids(self.setup, self.decode, given) or ())[:size]
        ids = ids if len(ids) == size else _random_ids(size)
        self.blocks = (size - 1) // block_tokens
        self.hashes = hash_tokens(array("I", ids), block_tokens, root=self._domain.root).data
        body = {"model": model, "prompt": ids, "max_tokens": ANSWER_TOKENS}
        return orjson.dumps(
            {**body, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        )

    async def _decode(self, body: bytes, handoff: Handoff) -> list[int] | None:
        """The tokens that the decode engine answers; None if it does not name them."""
        family = self.setup.families.of(self.prefill.engine)
        before = await self._loaded()
        several = len(self.setup.settings.store) > 1
        ids = block_ids(self.hashes[: self.landed * HASH_BYTES]).tolist()
        source = KvSource(self.store.url, "doctor", ids) if several else None
        leg = family.decode_body(parse(body, "completion", 1), handoff, source=source)
        answer = await self._ask(self.decode, leg)
        after = await self._loaded()
        cached = family.read_prefill_answer(answer).cached_tokens
        counts = [after - before] if before is not None and after is not None else []
        counts += [cached] if cached else []
        self.needed_tokens = self.landed * self._domain.block_tokens
        self.loaded_tokens = max(counts, default=None)
        return tokens_of(answer)

    async def _margin(self, body: bytes, difference: Difference) -> float | None:
        """How near a tie the two tokens were to the prefill engine; None if it does not say."""
        asked = {**orjson.loads(body), "max_tokens": difference.at + 1}
        asked |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        answer = await self.setup.ask(self.prefill.engine, COMPLETIONS, orjson.dumps(asked))
        return margin(answer, "completion", difference) if answer is not None else None

    async def _loaded(self) -> int | None:
        """Prompt tokens that the decode engine ever loaded from the store, by its metrics."""
        found = _HITS.findall(await self.setup.ask(self.decode.engine, "/metrics") or b"")
        return int(sum(map(float, found))) if found else None

    async def _ask(self, facts: EngineFacts, body: bytes) -> bytes:
        """The answer to a completion. Raises ProbeFailed."""
        self.at_fault = facts.name
        return (await self.setup.answer(facts.engine, COMPLETIONS, body)).body


async def connector_role(setup: Setup) -> Found:
    """Of a trial prompt, prefill engines store the blocks and decode engines load them."""
    for trial in setup.trials:
        if trial.stopped:
            continue
        if not trial.promised:
            yield error(
                trial.prefill.name,
                f"it computed a prompt of {trial.blocks} blocks and stored none of them: its "
                "connector does not save, or the store had no room",
                _PRODUCER,
            )
        elif trial.loaded_tokens is not None and trial.loaded_tokens < trial.needed_tokens:
            yield error(
                trial.decode.name,
                f"of {trial.needed_tokens} tokens that were in the store for it, it loaded "
                f"{trial.loaded_tokens} and computed the rest",
                _CONSUMER,
            )


async def landing(setup: Setup) -> Found:
    """A trial prompt's blocks are in the store within --landing-timeout."""
    for trial in setup.trials:
        if not trial.stopped and trial.landed < trial.promised:
            yield error(
                trial.prefill.name,
                f"it said that it stores {trial.promised} blocks, and {trial.landed} were there "
                f"after {setup.settings.landing_timeout_s:g} s",
                "look in its log for puts that failed, and at the network between it and the "
                "store; if that is only slow, raise --landing-timeout",
            )


async def end_to_end(setup: Setup) -> Found:
    """A trial prompt gets the same tokens through both legs as from the prefill engine alone."""
    for trial in setup.trials:
        near_tie = trial.margin is not None and trial.margin <= setup.settings.canary_near_tie
        if trial.stopped:
            yield error(
                trial.at_fault,
                f"a trial prompt failed: {trial.stopped}",
                "do as the sentence says, or look into its log at this moment",
            )
        elif (at := trial.difference) is not None and not near_tie:
            yield error(
                trial.names,
                f"after KV that the one computed and the other loaded, the answer differs from "
                f"token {at.at} on from that of the first alone ({at.served} and {at.alone})",
                "do not serve with this pair until the cause is known: compare their dtype, "
                "kernels, attention backends and versions, and run it again",
            )
