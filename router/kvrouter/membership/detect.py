"""What an engine says of itself when it joins: its family, its models, the KV that it needs.

It reads answers; how they are got is `probe`'s.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from kvrouter.engines.engine import Bootstrap, Identity, Role
from kvrouter.engines.families.base import BadAnswer, Handoff
from kvrouter.openai.endpoints import COMPLETIONS, GENERATION, KNOWN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.base import Family

    Ask = Callable[[Engine, str], Awaitable[bytes]]
    """The body of the engine's 200 to a GET of a path, or of a URL."""
    Post = Callable[[Engine, str, bytes], Awaitable[bytes]]

AUTO: Final = "auto"
MODELS_PATH: Final = "/v1/models"
MOONCAKE_PORT: Final = 8998
"""VLLM_MOONCAKE_BOOTSTRAP_PORT's default."""
_ABSENT: Final = frozenset({400, 401, 403, 404, 405, 501})
_NOT_THERE: Final = frozenset({404, 405, 501})
NO_COMPLETIONS: Final = "does not support Completions API"
"""vLLM's 400 before it left out what its model cannot do, from entrypoints/openai/api_server.py."""
_BLOCK_SIZE: Final = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bblock_size="(\d+)"', re.M)
_NIXL: Final = re.compile(rb"^vllm:nixl_", re.M)
_RANKS: Final = re.compile(rb'^vllm:num_requests_running\{[^}\n]*\bengine="(\d+)"', re.M)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_MOONCAKE_FROM: Final = (0, 8)  # no vLLM before has a connector of this kind
_IDS_DIFFER_FROM: Final = (0, 14)  # v1/engine/input_processor.py adds random letters to ids
_TRANSFERS_FROM: Final = (0, 16)  # MooncakeConnector with transfer_id and bootstrap servers
MAX_VERSION: Final = 64
PROBE_PRIORITY: Final = 1
"""Any but 0: vLLM's V0 engine refuses it where it does not schedule by priority."""
MAX_RANKS: Final = 512
"""Data-parallel ranks of one engine: each is a target of its own, with connections and counts."""

log = logging.getLogger(__name__)


class ProbeFailed(Exception):
    """An engine does not answer a probe as it should; says how, in a sentence.

    Attributes:
        status: of its answer, 0 where none came.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class DetectedModels:
    """What an engine's /v1/models tells, as `Identity` has it."""

    models: tuple[str, ...]
    adapters: tuple[tuple[str, str], ...]
    max_model_len: int | None


class EngineDetector:
    """Asks one engine after another who it is.

    Args:
        families: dialects by name.
        get: asks an engine.
        post: the same with a request, which may wait its turn among the engine's others.
        connector: the family of all engines, or "auto".
        model: the one model to serve, or None for whatever engines serve.
        bootstrap_ports: by the engine's address; under "" that of all others.
        rank_counts: data-parallel ranks, likewise, instead of those that engines tell of.
        try_priority: whether to find out which prefill engines take a `priority`.
    """

    def __init__(
        self,
        families: Callable[[str], Family],
        get: Ask,
        post: Post,
        *,
        connector: str = "store",
        model: str | None = None,
        bootstrap_ports: Mapping[str, int] | None = None,
        rank_counts: Mapping[str, int] | None = None,
        try_priority: bool = False,
    ) -> None:
        self._families = families
        self._get = get
        self._post = post
        self._connector = connector
        self._model = model
        self._ports = bootstrap_ports or {}
        self._counts = rank_counts or {}
        self._try_priority = try_priority

    async def introduce(self, engine: Engine) -> Identity:
        """All that the router wants to know of `engine`.

        Raises:
            ProbeFailed: it does not answer, or not as its family does.
        """
        served = await self.served(engine)
        endpoints = await self._endpoints(engine)
        name = await self._family_of(engine)
        metrics = await self._metrics(engine) if name != "openai" else b""
        info = await self._maybe(engine, "/server_info") if name == "sglang" else {}
        answered = None
        if _may_generate(endpoints, info):
            answered = await self._one_token(engine, name or self._connector, served.models[0])
        if answered is None:
            return Identity(
                served.models,
                max_model_len=served.max_model_len,
                adapters=served.adapters,
                family=name or "store",
                can_split=False,
                ranks=self._ranks(engine, metrics, info, None),
                version=await self._version(engine, name or "store", info),
                generates=False,
                endpoints=endpoints,
            )
        told, takes_priority = answered
        if name is None:
            name = self._vllm_kind(engine, told, metrics)
        pairs, alone, bootstrap = await self._legs(engine, name, info)
        return Identity(
            served.models,
            max_model_len=served.max_model_len,
            block_tokens=told.block_tokens or _block_size(metrics) or None,
            manifest=told.manifest,
            root=told.root,
            refusal=told.refusal,
            waits=told.waits,
            adapters=served.adapters,
            family=name,
            can_split=pairs,
            can_serve_whole=alone,
            bootstrap=bootstrap,
            ranks=self._ranks(engine, metrics, info, bootstrap),
            version=await self._version(engine, name, info),
            endpoints=endpoints,
            takes_priority=takes_priority,
        )

    async def served(self, engine: Engine) -> DetectedModels:
        """What `engine` serves now: adapters come and go while it runs.

        Raises:
            ProbeFailed: it does not answer, or does not serve the one model that it should.
        """
        cards = read_models(await self._get(engine, MODELS_PATH))
        models = tuple(dict.fromkeys(card.id for card in cards))
        if self._model is not None:
            if self._model not in models:
                raise ProbeFailed(f"it serves {', '.join(models)}, not --model {self._model}")
            models = (self._model,)
        adapters = tuple((card.id, card.root) for card in cards if card.parent and card.root)
        return DetectedModels(models, adapters, cards[0].max_model_len)

    async def _endpoints(self, engine: Engine) -> frozenset[str] | None:
        """Those of the router's endpoints that it has; None where it does not tell.

        vLLM's /openapi.json lists what its model can do (entrypoints/openai/api_server.py,
        `build_app`). A server that names none of them there serves them by some other way.
        """
        try:
            paths = (await self._maybe(engine, "/openapi.json")).get("paths")
        except ProbeFailed:  # a schema that it cannot make says nothing of the engine
            return None
        named = KNOWN.intersection(paths) if isinstance(paths, dict) else frozenset[str]()
        return named or None

    async def _family_of(self, engine: Engine) -> str | None:
        """Its family; None where it is vLLM, whose connector has yet to be found."""
        if self._connector.startswith("mooncake"):
            return await self._mooncake_form(engine)
        if self._connector != AUTO:
            return self._connector
        if "disaggregation_mode" in await self._maybe(engine, "/server_info"):
            return "sglang"
        if "version" in await self._maybe(engine, "/version"):
            return None
        log.info(
            "engine %s is taken for a plain OpenAI server: it has neither SGLang's /server_info "
            "nor vLLM's /version",
            engine.address,
        )
        return "openai"

    async def _version(self, engine: Engine, name: str, info: dict[str, Any]) -> str | None:
        """The version of its server, where it tells one."""
        told = info if info or name == "openai" else await self._maybe(engine, "/version")
        version = told.get("version")
        return version[:MAX_VERSION] if isinstance(version, str) else None

    async def _mooncake_form(self, engine: Engine) -> str:
        """The family of its version of MooncakeConnector; as the user says where none is told.

        Raises:
            ProbeFailed: it is one that hands over nothing and says it did.
        """
        told = (await self._maybe(engine, "/version")).get("version")
        found = _VERSION.match(str(told))
        version = (int(found[1]), int(found[2])) if found else (0, 0)
        if version < _MOONCAKE_FROM:  # also 0.1.dev1, as builds without tags call themselves
            return self._connector
        if _IDS_DIFFER_FROM <= version < _TRANSFERS_FROM:
            raise ProbeFailed(
                f"vLLM {told} gives the legs of one request different ids, by which its "
                "MooncakeConnector matches them: no KV would be loaded, and answers would be wrong "
                "without an error; use vLLM 0.13, or 0.16 and later"
            )
        return "mooncake" if version >= _TRANSFERS_FROM else "mooncake-legacy"

    async def _maybe(self, engine: Engine, path: str) -> dict[str, Any]:
        """The JSON object at `path`, empty where the engine has none there."""
        try:
            found = orjson.loads(await self._get(engine, path))
        except ProbeFailed as error:
            if error.status not in _ABSENT:
                raise
            return {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def _one_token(
        self, engine: Engine, name: str, model: str
    ) -> tuple[Handoff, bool] | None:
        """What the answer to the smallest request tells, and whether it took a `priority`.

        None where the engine does not generate text.
        """
        family = self._families("store" if name == AUTO else name)
        ranks = (
            self._try_priority and family.schedules_by_priority and engine.role.serves(Role.PREFILL)
        )
        first = family.probe_body(model, priority=PROBE_PRIORITY) if ranks else None
        try:
            if first is not None and (answer := await self._took_priority(engine, first)):
                return _handoff(family, answer), True
            probe = family.probe_body(model)
            if probe is None:
                return Handoff(), False
            return _handoff(family, await self._post(engine, COMPLETIONS, probe)), False
        except ProbeFailed as error:
            if error.status in _NOT_THERE or NO_COMPLETIONS in str(error):
                return None
            raise

    async def _took_priority(self, engine: Engine, probe: bytes) -> bytes | None:
        """The answer to a request with a `priority`; None where the engine takes none."""
        try:
            return await self._post(engine, COMPLETIONS, probe)
        except ProbeFailed as error:
            if error.status != 400 or NO_COMPLETIONS in str(error):
                raise
            log.info("engine %s takes no `priority`: %s", engine.address, error)
            return None

    async def _metrics(self, engine: Engine) -> bytes:
        try:
            return await self._get(engine, "/metrics")
        except ProbeFailed:
            return b""

    def _vllm_kind(self, engine: Engine, told: Handoff, metrics: bytes) -> str:
        """The family of a vLLM engine, by its connector.

        Raises:
            ProbeFailed: it has two, each of which hands KV over in its own way.
        """
        nixl = _NIXL.search(metrics) is not None
        if told.manifest is not None and nixl:
            raise ProbeFailed(
                "it has kvrouter's connector and NixlConnector (by MultiConnector), and the router "
                "uses one of them: start it with one, or give --kv-connector store, by which its "
                "NixlConnector is not used"
            )
        if told.manifest is not None:
            return "store"
        if nixl:
            log.info("engine %s is vLLM with NixlConnector, by its metrics", engine.address)
            return "nixl"
        log.warning(
            "engine %s is vLLM, and neither kvrouter's connector nor NixlConnector was found in "
            "it: KV is taken to be shared through a store of its own (LMCache, MooncakeStore), or "
            "not at all. MooncakeConnector cannot be detected: give --kv-connector mooncake",
            engine.address,
        )
        return "store"

    async def _legs(
        self, engine: Engine, name: str, info: dict[str, Any]
    ) -> tuple[bool, bool, Bootstrap | None]:
        """Whether it does one leg of two, whether it can do without the other, where it is met."""
        prefills = engine.role.serves(Role.PREFILL)
        if name == "sglang":
            return self._sglang_legs(engine, info)
        if name == "mooncake" and prefills:
            return True, True, await self._mooncake_bootstrap(engine)
        return name != "openai", True, None

    def _sglang_legs(
        self, engine: Engine, info: dict[str, Any]
    ) -> tuple[bool, bool, Bootstrap | None]:
        mode = info.get("disaggregation_mode")
        if mode not in ("prefill", "decode"):
            return False, True, None
        if engine.role is not Role(mode):
            raise ProbeFailed(
                f"it was started with --disaggregation-mode {mode}; name it under --{mode} alone"
            )
        if mode == "decode":
            return True, False, None
        told = info.get("disaggregation_bootstrap_port")
        port = self._port(engine) or (told if isinstance(told, int) else 0)
        if not 0 < port < 65536:
            raise ProbeFailed("its /server_info names no bootstrap port: give --bootstrap-port")
        return True, False, Bootstrap(engine.host, port)

    async def _mooncake_bootstrap(self, engine: Engine) -> Bootstrap:
        """Ask its bootstrap server how it calls its data-parallel ranks."""
        found = Bootstrap(engine.host, self._port(engine) or MOONCAKE_PORT)
        url = f"http://{found.bracketed}:{found.port}/query"
        try:
            ranks = msgspec.json.decode(await self._get(engine, url), type=dict[int, _Rank])
        except ProbeFailed as error:
            raise ProbeFailed(f"MooncakeConnector's bootstrap server: {error}") from None
        except (ValueError, RecursionError) as error:  # msgspec raises more than its own
            raise ProbeFailed(f"{url} is not MooncakeConnector's ({error})") from None
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ProbeFailed(f"{url}: not all of its data-parallel ranks are there yet")
        names = tuple(ranks[rank].engine_id for rank in sorted(ranks))
        return Bootstrap(found.host, found.port, names)

    def _ranks(
        self, engine: Engine, metrics: bytes, info: dict[str, Any], bootstrap: Bootstrap | None
    ) -> tuple[int, ...]:
        """How its KV events number its data-parallel ranks, as it tells, or 0 and up.

        vLLM's metrics have the numbers as labels; SGLang's `dp_size` is how many there are. What
        MooncakeConnector names its ranks, decode engines must be told, whatever the user says.
        """
        size = info.get("dp_size")
        told = tuple(range(size)) if isinstance(size, int) and 0 < size <= MAX_RANKS else ()
        told = told or tuple(sorted({int(number) for number in _RANKS.findall(metrics)}))
        named = len(bootstrap.engine_ids) if bootstrap is not None else 0
        given = named or self._counts.get(engine.address) or self._counts.get("") or len(told)
        if told and given != len(told) and (named or given != 1):
            raise ProbeFailed(
                f"it tells of {len(told)} data-parallel ranks, not of {given}"
                + (": not all are there yet" if named else ", as --data-parallel-size says")
            )
        if given > MAX_RANKS:
            raise ProbeFailed(f"it has {given} data-parallel ranks: give --data-parallel-size 1")
        return told if given == len(told) else tuple(range(given)) if given > 1 else ()

    def _port(self, engine: Engine) -> int | None:
        return self._ports.get(engine.address) or self._ports.get("")


def _handoff(family: Family, answer: bytes) -> Handoff:
    try:
        return family.read_prefill_answer(answer)
    except BadAnswer as error:
        raise ProbeFailed(str(error)) from None


class _Rank(msgspec.Struct):
    engine_id: str


class Card(msgspec.Struct):
    """One model of /v1/models; an adapter has its base as `parent` and its path as `root`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


def read_models(body: bytes) -> list[Card]:
    """The models that /v1/models names.

    Raises:
        ProbeFailed: it names none.
    """
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (ValueError, RecursionError) as error:  # msgspec raises more than its own
        raise ProbeFailed(f"/v1/models is not OpenAI's list ({error})") from None
    if not cards:
        raise ProbeFailed("/v1/models names no model")
    return cards


def _may_generate(endpoints: frozenset[str] | None, info: dict[str, Any]) -> bool:
    """Whether an engine with these endpoints and this /server_info may generate text.

    SGLang lists every endpoint, and says in `is_embedding` how it was started.
    """
    listed = endpoints is None or not endpoints.isdisjoint(GENERATION)
    return listed and info.get("is_embedding") is not True


def _block_size(metrics: bytes) -> int:
    """Of vllm:cache_config_info; 0 where the engine's metrics do not tell."""
    found = _BLOCK_SIZE.search(metrics)
    return int(found.group(1)) if found else 0
