"""Trials: a prompt of a few blocks through a prefill engine, the store and a decode engine.

A prompt consists of random words, so that no engine holds its KV. Its blocks are deleted later.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from dataclasses import dataclass
from itertools import product
from random import SystemRandom
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.canary.verdict import Difference, first_difference, margin, tokens_of
from kvrouter.engines.compatibility import shares
from kvrouter.engines.engine import HashDomain, Role
from kvrouter.engines.families.base import BadAnswer, Handoff, LegOrder
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.openai.endpoints import COMPLETIONS
from kvrouter.openai.request import parse
from kvrouter.tools.doctor.links import await_links
from kvrouter.tools.doctor.store_facts import open_clients
from kvrouter.tools.doctor.tokenizers import token_ids
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.chain import hash_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.tools.doctor.base import Setup
    from kvrouter.tools.doctor.engine_facts import EngineFacts
    from kvrouter_store.client.asyncio_client import AsyncStoreClient
    from kvrouter_store.identity.block import Manifest

TRIAL_BLOCKS: Final = 4
"""Blocks of the trial prompt that can be handed over; it has one token more, to compute."""
ANSWER_TOKENS: Final = 8
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_HITS: Final = re.compile(rb"^vllm:external_prefix_cache_hits_total\{[^}\n]*\} (\S+)", re.M)


@dataclass(slots=True)
class Trial:
    """The result of a trial with one prefill and one decode engine.

    Attributes:
        store: URL of the node that the prefill engine writes to.
        stopped: the problem that ended it, in a sentence; later attributes are then unset.
        at_fault: the engine that caused the problem; None if neither did.
        blocks: whole blocks of the prompt.
        promised: how many of them the prefill engine said it would store.
        landed: how many of them were in the store in time; None if not asked.
        no_room: puts that the store refused meanwhile for lack of room.
        loaded_tokens: what the decode engine loaded or had; None if unknown.
        difference: where its answer differs from that of the prefill engine alone, or None.
        margin: by how much one of both tokens is likelier there, in logarithms; None if unknown.
        needed_tokens: tokens of the prompt that could be loaded.
    """

    prefill: EngineFacts
    decode: EngineFacts
    store: str
    stopped: str | None = None
    at_fault: EngineFacts | None = None
    blocks: int = 0
    promised: int = 0
    landed: int | None = None
    no_room: int = 0
    loaded_tokens: int | None = None
    difference: Difference | None = None
    margin: float | None = None
    needed_tokens: int = 0

    @property
    def names(self) -> str:
        """Both engines, as findings name them."""
        return f"{self.prefill.name}, {self.decode.name}"


async def try_pairs(setup: Setup) -> list[Trial]:
    """A trial of as many pairs as are needed for every engine to take part.

    Engines first get time to connect to the store. Trials whose prefill engine's manifest the store
    does not know, or whose node nobody knows, are left out: the checks `same-store` and
    `store-node` report these engines.
    """
    if not await setup.usable_stores():
        return []
    await await_links(setup)
    pairs = list(pairs_to_try(setup, await setup.known_engines()))
    if not pairs:
        return []
    async with open_clients(setup) as clients:
        only = next(iter(clients.values())) if len(setup.settings.store) == 1 else None
        homes = [(only or clients.get(pair[0].engine.node or ""), pair) for pair in pairs]
        attempts = (_Attempt(setup, home, *pair).run() for home, pair in homes if home is not None)
        trials = await asyncio.gather(*attempts)
    return [trial for trial in trials if trial is not None]


def pairs_to_try(
    setup: Setup, known: list[EngineFacts]
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
        and not set(prefill.models).isdisjoint(decode.models)
        and _domain(prefill) is not None
        and other.manifest is not None
        and shares(one, other)
    )


def _domain(facts: EngineFacts) -> HashDomain | None:
    """How the engine names the blocks that it stores; None if it stores none."""
    identity = facts.engine.identity
    return identity.domain if identity is not None and identity.manifest is not None else None


class _Stopped(Exception):
    """An engine failed its part of a trial."""

    def __init__(self, facts: EngineFacts, problem: object) -> None:
        super().__init__(str(problem))
        self.facts = facts


class _Attempt:
    """One trial."""

    def __init__(
        self, setup: Setup, store: AsyncStoreClient, prefill: EngineFacts, decode: EngineFacts
    ) -> None:
        domain = _domain(prefill)
        assert domain is not None
        self._setup = setup
        self._store = store
        self._domain = domain
        self._manifest: Manifest | None = None
        self._trial = Trial(prefill, decode, store.url)
        self._family = setup.families.of(prefill.engine)
        self._model = next(model for model in decode.models if model in prefill.models)
        self._hashes = b""

    async def run(self) -> Trial | None:
        """The trial; None if the store does not know the prefill engine's manifest.

        Never raises for what engines and store do.
        """
        trial = self._trial
        try:
            return trial if await self._run(trial) else None
        except _Stopped as stopped:
            trial.stopped, trial.at_fault = str(stopped), stopped.facts
        except KVStoreError as error:
            trial.stopped = f"the store: {error}"
        finally:
            await self._delete_blocks()
        return trial

    async def _run(self, trial: Trial) -> bool:
        refused = await self._refused_puts()
        body = await self._body()
        handoff = await self._prefill(body)
        self._manifest = await self._registered()
        if self._manifest is None:
            return False
        trial.landed = await self._land(self._manifest, handoff)
        trial.no_room = await self._refused_puts() - refused
        decoded = await self._decode(body, handoff)
        alone = tokens_of(await self._ask(trial.prefill, body))
        if decoded and alone:
            trial.difference = first_difference(decoded, alone)
        if trial.difference is not None:
            trial.margin = await self._margin(body, trial.difference)
        return True

    async def _refused_puts(self) -> int:
        return (await self._store.stats()).get("no_space_total", 0)

    async def _body(self) -> bytes:
        """A completion of a few tokens after a prompt of TRIAL_BLOCKS blocks and one token."""
        block_tokens = self._domain.block_tokens
        size = TRIAL_BLOCKS * block_tokens + 1
        identity = self._trial.decode.engine.identity
        room = (identity.max_model_len if identity else None) or size + ANSWER_TOKENS
        size = min(size, room - ANSWER_TOKENS)
        ids = await self._random_ids(size)
        self._trial.blocks = (size - 1) // block_tokens
        self._hashes = hash_tokens(array("I", ids), block_tokens, root=self._domain.root).data
        body = {"model": self._model, "prompt": ids, "max_tokens": ANSWER_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return orjson.dumps(body)

    async def _random_ids(self, size: int) -> list[int]:
        """Token ids of random words, or random small numbers if the engine does not tokenize."""
        draw = SystemRandom()
        words = ("".join(draw.choices(_LETTERS, k=draw.randint(2, 9))) for _ in range(2 * size))
        body = {"model": self._model, "prompt": " ".join(words)}
        found = await token_ids(self._setup, self._trial.decode, body)
        if found is None or len(found) < size:
            return [draw.randrange(100, 1000) for _ in range(size)]
        return list(found[:size])

    async def _prefill(self, body: bytes) -> Handoff:
        leg = self._family.prefill_body(parse(body, "completion", 1))
        handoff = self._read(self._trial.prefill, await self._ask(self._trial.prefill, leg))
        self._trial.promised = handoff.blocks
        return handoff

    def _read(self, facts: EngineFacts, answer: bytes) -> Handoff:
        """What an answer says of KV. Raises _Stopped."""
        try:
            return self._family.read_prefill_answer(answer)
        except BadAnswer as error:
            raise _Stopped(facts, error) from None

    async def _registered(self) -> Manifest | None:
        """The prefill engine's manifest, as the store knows it now."""
        digest = self._trial.prefill.engine.manifest
        known = await self._store.manifests()
        return next((one.manifest for one in known if one.digest.hex() == digest), None)

    async def _land(self, manifest: Manifest, handoff: Handoff) -> int:
        """Blocks in the store when all have landed, or after --landing-timeout."""
        upto = min(handoff.blocks, self._trial.blocks)
        if not upto:
            return 0
        timeout_s = self._setup.settings.landing_timeout_s
        landing = await self._store.wait(manifest, self._hashes, upto, timeout_s)
        return upto if landing.landed else landing.blocks

    async def _decode(self, body: bytes, handoff: Handoff) -> list[int] | None:
        """The tokens that the decode engine answers; None if it does not name them."""
        trial = self._trial
        request = parse(body, "completion", 1)
        before = await self._loaded(trial.decode)
        source = trial.store if len(self._setup.settings.store) > 1 else None
        leg = self._family.decode_body(request, handoff, source=source)
        answer = await self._ask(trial.decode, leg)
        after = await self._loaded(trial.decode)
        cached = self._read(trial.decode, answer).cached_tokens
        counts = [after - before] if before is not None and after is not None else []
        counts += [cached] if cached else []
        trial.needed_tokens = min(trial.landed or 0, trial.blocks) * self._domain.block_tokens
        trial.loaded_tokens = max(counts, default=None)
        return tokens_of(answer)

    async def _margin(self, body: bytes, difference: Difference) -> float | None:
        """How near a tie the two tokens were to the prefill engine; None if it does not say."""
        asked = {**orjson.loads(body), "max_tokens": difference.at + 1}
        asked |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        engine = self._trial.prefill.engine
        answer = await self._setup.ask(engine, COMPLETIONS, orjson.dumps(asked))
        return margin(answer, "completion", difference) if answer is not None else None

    async def _loaded(self, facts: EngineFacts) -> int | None:
        """Prompt tokens that the engine ever loaded from the store, by its metrics."""
        found = _HITS.findall(await self._setup.ask(facts.engine, "/metrics") or b"")
        return int(sum(map(float, found))) if found else None

    async def _ask(self, facts: EngineFacts, body: bytes) -> bytes:
        """The answer to a completion. Raises _Stopped."""
        setup = self._setup
        try:
            answer = await setup.probe.ask(facts.engine, COMPLETIONS, body, setup.deadline_s)
        except ProbeFailed as problem:
            raise _Stopped(facts, problem) from None
        return answer.body

    async def _delete_blocks(self) -> None:
        if self._manifest is None:
            return
        try:
            await self._store.delete(self._manifest, self._hashes)
        except KVStoreError:
            return  # the store evicts blocks first that no client asks for
