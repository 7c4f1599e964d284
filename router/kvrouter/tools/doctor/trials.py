"""A prompt of a few blocks, taken through a prefill engine, the store and a decode engine for real.

It is made of random words, so that nobody holds any of its KV. Its blocks are deleted afterwards.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from dataclasses import dataclass
from itertools import cycle, islice
from random import SystemRandom
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.canary.verdict import Difference, first_difference, margin, tokens_of
from kvrouter.engines.compatibility import shares
from kvrouter.engines.engine import Role
from kvrouter.engines.families.base import BadAnswer, Handoff, LegOrder
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.openai.request import parse
from kvrouter.tools.doctor.links import await_links
from kvrouter.tools.doctor.store_facts import open_client
from kvrouter.tools.doctor.tokenizers import token_ids
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.chain import hash_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.engines.engine import HashDomain
    from kvrouter.engines.families.base import Family
    from kvrouter.tools.doctor.base import SetUp
    from kvrouter.tools.doctor.engine_facts import EngineFacts
    from kvrouter_store.client.asyncio_client import AsyncStoreClient
    from kvrouter_store.identity.block import Manifest

TRIAL_BLOCKS: Final = 4
"""Blocks of the trial prompt that can be handed over; a token more is computed."""
ANSWER_TOKENS: Final = 8
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_HITS: Final = re.compile(rb"^vllm:external_prefix_cache_hits_total\{[^}\n]*\} (\S+)", re.M)
_COMPLETIONS: Final = "/v1/completions"


@dataclass(slots=True)
class Trial:
    """What became of the trial prompt with one prefill and one decode engine.

    Attributes:
        prefill: computed it.
        decode: was to load it.
        stopped: what went wrong on the way, in a sentence; then nothing below is known but what
            came before.
        at_fault: the engine that it was; None: it was neither.
        blocks: whole blocks of the prompt.
        promised: how many of them the prefill engine said it would store.
        landed: how many of them were in the store in time; None where that was not asked.
        no_room: puts that the store refused meanwhile for want of room.
        loaded_tokens: what the decode engine loaded or had; None where it does not tell.
        difference: where its answer parts from that of the prefill engine alone; None: nowhere, or
            they do not name their tokens.
        margin: by how much the one token is likelier there, in logarithms; None where not told.
        needed_tokens: of the prompt, what could be loaded.
    """

    prefill: EngineFacts
    decode: EngineFacts
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


async def try_pairs(setup: SetUp) -> list[Trial]:
    """Take a prompt through as many pairs as it takes for every engine to have its turn.

    Engines first get time to connect to the store. Trials of prefill engines that do not connect
    are left out: the check `same-store` reports these engines.
    """
    if await setup.the_store() is None:
        return []
    await await_links(setup)
    pairs = list(_pairs(setup, await setup.known_engines()))
    if not pairs:
        return []
    async with open_client(setup.settings) as client:
        attempts = (_Attempt(setup, client, *pair).run() for pair in pairs)
        trials = await asyncio.gather(*attempts)
    return [trial for trial in trials if trial is not None]


def _pairs(setup: SetUp, known: list[EngineFacts]) -> Iterator[tuple[EngineFacts, EngineFacts]]:
    """Engines that are to share KV through the store, each at least once where it has a partner."""
    able = [each for each in known if setup.families.of(each.engine).order is LegOrder.STORE]
    prefill = [each for each in able if each.engine.role.serves(Role.PREFILL)]
    decode = [each for each in able if each.engine.role.serves(Role.DECODE)]
    if prefill and decode and prefill[0] is decode[0]:  # engines of both roles: none with itself
        decode = [*decode[1:], decode[0]]
    most = max(len(prefill), len(decode)) if prefill and decode else 0
    rows = zip(islice(cycle(prefill), most), islice(cycle(decode), most), strict=True)
    for one, other in rows:
        common = set(one.models) & set(other.models)
        tell = _domain(one) is not None and other.engine.manifest is not None
        if one is not other and common and tell and shares(one.engine, other.engine):
            yield one, other


def _domain(facts: EngineFacts) -> HashDomain | None:
    """How the engine names the blocks that it stores; None where it stores none."""
    identity = facts.engine.identity
    return identity.domain if identity is not None and identity.manifest is not None else None


class _Attempt:
    """One trial under way."""

    def __init__(
        self,
        setup: SetUp,
        store: AsyncStoreClient,
        prefill: EngineFacts,
        decode: EngineFacts,
    ) -> None:
        domain = _domain(prefill)
        assert domain is not None
        self._setup = setup
        self._store = store
        self._domain = domain
        self._manifest: Manifest | None = None
        self._trial = Trial(prefill, decode)
        self._family: Family = setup.families.of(prefill.engine)
        self._model = next(model for model in decode.models if model in prefill.models)
        self._hashes = b""

    async def run(self) -> Trial | None:
        """The trial; None where its prefill engine is not connected to the store.

        Never raises for what engines and store do.
        """
        trial = self._trial
        try:
            refused = (await self._store.stats()).get("no_space_total", 0)
            body = await self._body()
            handoff = await self._prefill(body)
            if handoff is None:
                return trial
            self._manifest = await self._registered()
            if self._manifest is None:
                return None
            trial.landed = await self._land(handoff)
            trial.no_room = (await self._store.stats()).get("no_space_total", 0) - refused
            decoded = await self._decode(body, handoff)
            alone = await self._ask(trial.prefill, body) if decoded is not None else None
            if alone is not None:
                await self._compare(body, decoded, tokens_of(alone))
        except KVStoreError as error:
            trial.stopped = f"the store: {error}"
        finally:
            await self._clean_up()
        return trial

    async def _body(self) -> bytes:
        """A completion of a few tokens after a prompt of so many blocks and one token."""
        block_tokens = self._domain.block_tokens
        size = TRIAL_BLOCKS * block_tokens + 1
        identity = self._trial.decode.engine.identity
        room = (identity.max_model_len if identity else None) or size + ANSWER_TOKENS
        size = min(size, room - ANSWER_TOKENS)
        ids = await self._random_ids(size)
        self._trial.blocks = (size - 1) // block_tokens
        self._hashes = hash_tokens(array("I", ids), block_tokens, root=self._domain.root).data
        return orjson.dumps(
            {
                "model": self._model,
                "prompt": ids,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )

    async def _random_ids(self, size: int) -> list[int]:
        """Token ids of random words; of random small numbers where no engine tokenises."""
        draw = SystemRandom()
        words = ("".join(draw.choices(_LETTERS, k=draw.randint(2, 9))) for _ in range(2 * size))
        body = {"model": self._model, "prompt": " ".join(words)}
        found = await token_ids(self._setup, self._trial.decode, body)
        if found is None or len(found) < size:
            return [draw.randrange(100, 1000) for _ in range(size)]
        return list(found[:size])

    async def _prefill(self, body: bytes) -> Handoff | None:
        request = parse(body, "completion", 1)
        leg = self._family.prefill_body(request)
        answer = await self._ask(self._trial.prefill, leg)
        if answer is None:
            return None
        try:
            handoff = self._family.read_prefill_answer(answer)
        except BadAnswer as error:
            self._stop(self._trial.prefill, str(error))
            return None
        self._trial.promised = handoff.blocks
        return handoff

    async def _registered(self) -> Manifest | None:
        """The prefill engine's manifest, as the store knows it now."""
        digest = self._trial.prefill.engine.manifest
        known = await self._store.manifests()
        return next((one.manifest for one in known if one.digest.hex() == digest), None)

    async def _land(self, handoff: Handoff) -> int:
        """Blocks that are in the store when all have landed, or the landing's time is over."""
        upto = min(handoff.blocks, self._trial.blocks)
        if not upto:
            return 0
        assert self._manifest is not None
        timeout_s = self._setup.settings.landing_timeout_s
        landing = await self._store.wait(self._manifest, self._hashes, upto, timeout_s)
        return upto if landing.landed else landing.blocks

    async def _decode(self, body: bytes, handoff: Handoff) -> list[int] | None:
        """The tokens that the decode engine answers; None where it does not, or names none."""
        trial, block_tokens = self._trial, self._domain.block_tokens
        request = parse(body, "completion", 1)
        before = await self._loaded(trial.decode)
        answer = await self._ask(trial.decode, self._family.decode_body(request, handoff))
        if answer is None:
            return None
        trial.needed_tokens = min(trial.landed or 0, trial.blocks) * block_tokens
        after = await self._loaded(trial.decode)
        cached = self._family.read_prefill_answer(answer).cached_tokens
        told = [after - before] if before is not None and after is not None else []
        told += [cached] if cached else []
        trial.loaded_tokens = max(told, default=None)
        return tokens_of(answer)

    async def _compare(
        self, body: bytes, decoded: list[int] | None, alone: list[int] | None
    ) -> None:
        """Where they part, the prefill engine is asked how near a tie it was."""
        difference = first_difference(decoded or [], alone or []) if decoded and alone else None
        self._trial.difference = difference
        if difference is None:
            return
        asked = {**orjson.loads(body), "max_tokens": difference.at + 1}
        asked |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        raw = orjson.dumps(asked)
        try:
            answer = await self._setup.asker.ask(
                self._trial.prefill.engine, _COMPLETIONS, raw, self._setup.deadline_s
            )
        except ProbeFailed:
            return  # it tells no log-probabilities
        self._trial.margin = margin(answer.body, "completion", difference)

    async def _loaded(self, facts: EngineFacts) -> int | None:
        """Prompt tokens that the engine ever loaded from the store, as its metrics tell."""
        timeout_s = self._setup.settings.health_timeout_s
        try:
            page = await self._setup.asker.ask(facts.engine, "/metrics", None, timeout_s)
        except ProbeFailed:
            return None
        found = _HITS.findall(page.body)
        return int(sum(map(float, found))) if found else None

    async def _ask(self, facts: EngineFacts, body: bytes) -> bytes | None:
        """The answer to a completion; None where there is none, which the trial then says."""
        try:
            answer = await self._setup.asker.ask(
                facts.engine, _COMPLETIONS, body, self._setup.deadline_s
            )
        except ProbeFailed as problem:
            self._stop(facts, str(problem))
            return None
        return answer.body

    def _stop(self, facts: EngineFacts, why: str) -> None:
        self._trial.stopped, self._trial.at_fault = why, facts

    async def _clean_up(self) -> None:
        if self._manifest is None:
            return
        try:
            await self._store.delete(self._manifest, self._hashes)
        except KVStoreError:
            return  # what nobody asks for is evicted first
