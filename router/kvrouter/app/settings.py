"""Settings of the router: a flag wins over the environment, the YAML file and the default.

They are read at the start and on SIGHUP. Settings of one package stand as a plain pydantic model in
that package; `RouterSettings` inherits their fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    model_validator,
)
from pydantic_settings import SettingsConfigDict

from kvrouter.access.settings import AccessSettings, PortSettings
from kvrouter.admission.settings import AdmissionSettings
from kvrouter.canary.settings import CanarySettings
from kvrouter.engines.engine import Role
from kvrouter.engines.families import AUTO, FAMILIES, Connector
from kvrouter.engines.life import LifeLimits
from kvrouter.engines.model_settings import ModelSettings
from kvrouter.engines.settings import FailoverSettings
from kvrouter.http.server.settings import ClientSettings
from kvrouter.membership.discovery.base import both_roles
from kvrouter.membership.discovery.settings import DiscoverySettings
from kvrouter.options.secret_file import secret_of
from kvrouter.options.settings import Settings, StoreAccess
from kvrouter.options.types import (
    Addresses,
    EnginePorts,
    Port,
    RankCounts,
    StoreUrls,
    by_engine,
    checked,
)
from kvrouter.prefix.events.settings import KvEventSettings
from kvrouter.prefix.stores import is_foreign, store_urls
from kvrouter.prefix.tokenize import tokenizer_file
from kvrouter.redis.settings import RedisSettings
from kvrouter.routing.planner.queue import SHORT_PAUSE_S, USUAL_PAUSE_S
from kvrouter.routing.policies import POLICIES, PolicyName
from kvrouter.routing.policies.planner import Planner
from kvrouter.routing.policies.prefix import Prefix
from kvrouter.telemetry.settings import ObservabilitySettings
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.tls import native_context
from kvrouter_store.node.start_checks import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.families.base import Family
    from kvrouter.routing.policies.base import Policy


def _summaries(registry: Mapping[str, type[Family | Policy]]) -> str:
    return " ".join(f"{name}: {each.summary}." for name, each in registry.items())


class RouterSettings(
    DiscoverySettings,
    ModelSettings,
    PortSettings,
    AccessSettings,
    AdmissionSettings,
    FailoverSettings,
    ClientSettings,
    KvEventSettings,
    RedisSettings,
    CanarySettings,
    ObservabilitySettings,
    StoreAccess,
    Settings,
):
    """Settings of `kvrouter serve`: its own, and those of the packages."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_")

    prefill: Addresses = Field(
        default_factory=list,
        description="Engines for prefill legs, as URL or HOST:PORT; LABEL=URL gives an engine a "
        "label for the status page. An engine that --decode names too takes both legs.",
        json_schema_extra={"section": "Engines"},
    )
    decode: Addresses = Field(
        default_factory=list,
        description="Engines for decode legs, as URL or HOST:PORT. The router needs one, or "
        "--discovery, or --admin.",
    )
    kv_connector: Connector = Field(
        default=AUTO,
        description=f"How the engines transfer KV. {_summaries(FAMILIES)} "
        "auto: the router asks each engine.",
    )
    bootstrap_port: EnginePorts = Field(
        default_factory=list,
        description="Port at which decode engines find a prefill engine of SGLang, "
        "MooncakeConnector or a p2p tier: PORT for all engines or HOST:PORT=PORT for one. By "
        "default the router reads it from SGLang's /server_info, and takes 8998 for "
        "MooncakeConnector and 5710 for a p2p tier.",
    )
    data_parallel_size: RankCounts = Field(
        default_factory=list,
        description="Data-parallel ranks of an engine: COUNT for all engines or HOST:PORT=COUNT "
        "for one. The router chooses and counts each rank as an engine of its own, named "
        "HOST:PORT@RANK. With 1, the engine itself spreads requests over its ranks. By default "
        "the router reads the number from vLLM's metrics or SGLang's /server_info.",
        json_schema_extra={"flags": ["--intra-node-data-parallel-size"]},
    )
    model: str | None = Field(
        default=None,
        description="Serve this model alone, and answer 404 for any other. By default the router "
        "serves every model that the engines' /v1/models name.",
    )
    model_retention_s: float = Field(
        default=300.0,
        ge=0,
        description="How long the router remembers a model after its last engine left. Until "
        "then, requests for it wait (--engine-wait) and are answered 503; after that, 404.",
    )
    health_interval_s: float = Field(
        default=2.0,
        gt=0,
        description="Time between two health checks of an engine.",
        json_schema_extra={"flags": ["--health-check-interval-secs"]},
    )
    health_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest time for the answer to a health check.",
        json_schema_extra={"flags": ["--health-check-timeout-secs"]},
    )
    health_failure_threshold: int = Field(
        default=2,
        ge=1,
        description="Failed health checks in a row after which an engine gets no more requests. "
        "One that does not answer may be busy: it leaves only if it shows no other sign of life, a "
        "byte of an answer or KV events, for as long as so many checks take, twice as long with "
        "nothing but prefill legs. Then its requests end or go to another engine.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on.",
        json_schema_extra={"section": "Ports and TLS"},
    )
    port: Port = Field(default=8000, description="Port to listen on; 0 takes a free one.")
    store: Annotated[StoreUrls, AfterValidator(store_urls)] = Field(
        default_factory=list,
        description="Node of the KV store that the engines' connectors use: kv://HOST:PORT, or "
        "kvs://HOST:PORT for TLS. Give each node if there are several. Or a store of another "
        "project: mooncake://HOST:PORT, the admin port of a Mooncake master, or "
        "lmcache://HOST:PORT, LMCache's coordinator. Without it the router does not wait until KV "
        "has landed; the engines' own connectors still transfer KV.",
        json_schema_extra={"section": "KV store"},
    )
    store_discovery: bool = Field(
        default=False,
        description="There is a KV store, whose nodes --discovery names. Not needed beside "
        "--store.",
    )
    landing_timeout_s: float = Field(
        default=2.0,
        gt=0,
        le=600,
        description="Longest wait, after the answer of the prefill leg, until its KV is in the "
        "store.",
    )
    decode_dispatch: Literal["landing", "chunk", "at-once"] = Field(
        default="landing",
        description="When the router sends the decode leg. landing: when all KV of the prompt is "
        "in the store. chunk: when the first blocks are. at-once: together with the prefill leg. "
        "With chunk and at-once, the decode engine loads blocks while the prefill engine computes "
        "the rest.",
    )
    dispatch_chunk_blocks: int = Field(
        default=1,
        ge=1,
        description="With --decode-dispatch chunk: how many new blocks must be in the store "
        "before the router sends the decode leg.",
    )
    policy: PolicyName = Field(
        default=Prefix.name,
        description=f"How the router chooses engines. {_summaries(POLICIES)}",
        json_schema_extra={"section": "Routing"},
    )
    session_key: str | None = Field(
        default=None,
        description="Header that names the session of a request. With --policy prefix or planner, "
        "a session without known block hashes stays with its engine while that has room. Without "
        "the header: x-session-id, the headers of coding agents, `prompt_cache_key`, or how a chat "
        "begins. "
        "--model-alias gives each session one version of a model.",
        json_schema_extra={"metavar": "HEADER", "section": "Routing"},
    )
    prefill_threshold: int | None = Field(
        default=None,
        ge=0,
        description="Skip the prefill leg if the decode engine has at most this many prompt "
        "tokens to compute, those of other requests included. Tokens that it holds or can load "
        "do not count. Default: 0; with --policy planner --stall-weight decides.",
        json_schema_extra={"metavar": "TOKENS"},
    )
    stall_weight: float = Field(
        default=0.3,
        ge=0,
        description="With --policy planner and without --prefill-threshold: a decode engine "
        f"computes a prompt itself if it then computes for at most {SHORT_PAUSE_S:g} s, or where "
        "that is sooner. A second for which a stream pauses for it counts as so many seconds, and "
        f"in pauses of more than {USUAL_PAUSE_S:g} s by the cube of their length too.",
        json_schema_extra={"metavar": "SECONDS"},
    )
    max_predicted_ttft_s: float = Field(
        default=0.0,
        ge=0,
        description="With --policy planner: answer 429 with Retry-After if the first token is "
        "predicted to come later than this, and the prompt would have to wait. 0: never.",
    )
    prefill_priority: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Send the estimated work of each prefill leg as its `priority`, so that a "
        "vLLM engine with --scheduling-policy priority computes the shortest first. auto: to "
        "engines that accepted a priority when they joined. A client's own priority wins.",
    )
    recompute_budget_tokens: int = Field(
        default=131072,
        ge=0,
        description="Prompt tokens that decode engines may compute at a time because their KV did "
        "not land. Requests beyond the budget are answered 429 with Retry-After.",
        json_schema_extra={"flags": ["--recompute-budget"], "metavar": "TOKENS"},
    )
    tokenizer: Annotated[str | None, checked(tokenizer_file)] = Field(
        default=None,
        description="A tokenizer.json, or the directory of a model that has one: the router then "
        "tokenises text prompts itself (needs kvrouter[tokenizers]). By default it asks an "
        "engine's /tokenize.",
        json_schema_extra={"metavar": "PATH"},
    )
    resume_streams: bool = Field(
        default=False,
        description="If the engine of a stream dies, continue the stream on another engine. This "
        "works for requests whose next token depends on the tokens before it alone, and costs a "
        "few microseconds of CPU for each event of their streams.",
    )
    max_choices: int = Field(
        default=1024,
        ge=1,
        description="Choices (prompts times n) that one request may ask for; more are answered "
        "400. Each prompt of a list counts as one request in flight.",
        json_schema_extra={"section": "Limits and time-outs"},
    )
    admin: bool = Field(
        default=False,
        description="Serve /workers, which lists, adds and drains engines. On an address beyond "
        "loopback it needs --admin-token.",
        json_schema_extra={"section": "Administration"},
    )
    admin_token: SecretStr = Field(
        default=SecretStr(""),
        description="Token that /workers and the status page require, as Authorization: Bearer. "
        "Give it in the environment: other users can see flags.",
    )
    admin_token_file: str = Field(
        default="",
        description="File that holds this token, in place of --admin-token. The router reads it "
        "again on SIGHUP.",
    )
    drain_delay_s: float = Field(
        default=5.0,
        ge=0,
        description="How long the router still accepts connections after SIGTERM, while /health "
        "and /ready answer 503 and every answer closes its connection, so that load balancers "
        "notice. It counts towards --drain-timeout. SIGINT (Ctrl-C) skips it.",
        json_schema_extra={"section": "Shutdown"},
    )
    drain_timeout_s: float = Field(
        default=25.0,
        ge=0,
        description="How long requests in flight may take after SIGTERM or SIGINT. After that, "
        "streams end with an error event and other requests are answered 503. A supervisor that "
        "kills the process must wait at least 5 s longer.",
    )

    @model_validator(mode="after")
    def _secret_of_a_file(self) -> RouterSettings:
        self.admin_token = secret_of(self.admin_token, self.admin_token_file, "--admin-token")
        return self

    @model_validator(mode="after")
    def _store_certificates(self) -> RouterSettings:
        for url in [*self.store_nodes, *(["kvs://any:1"] if self.store_discovery else [])]:
            native_context(parse_url(url), self.store_tls)
        return self

    @model_validator(mode="after")
    def _admin_needs_a_token(self) -> RouterSettings:
        host = self.host if self.control_port is None else self.control_host
        if self.admin and not self.admin_token.get_secret_value() and not is_loopback(host):
            raise ValueError(
                f"with --admin, every client that reaches {host} could add and remove engines: "
                "give --admin-token TOKEN, or listen on --host 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _discovery_needs_redis(self) -> RouterSettings:
        if "redis" in self.discovery and not self.redis.get_secret_value():
            raise ValueError("--discovery redis needs --redis redis://HOST:PORT/DB")
        if self.store_discovery and not self.discovery:
            raise ValueError("--store-discovery needs a source of nodes: give --discovery")
        if self.store_discovery and self.store != self.store_nodes:
            raise ValueError(f"{self.store[0]} is a whole store: leave out --store-discovery")
        return self

    @model_validator(mode="after")
    def _events_are_of_nodes(self) -> RouterSettings:
        ports, replays = by_engine(self.store_events_connect), by_engine(self.store_events_replay)
        if ports and not self.has_nodes:
            raise ValueError("--store-events-connect needs store nodes: give --store kv://...")
        if replays and not ports:
            raise ValueError("--store-events-replay is of use only with --store-events-connect")
        for node, port in ports.items():
            if replays.get(node, replays.get("")) in {None, port}:
                raise ValueError(
                    f"--store-events-connect {f'{node}={port}' if node else port} needs the node's "
                    "replay_endpoint, another port: give --store-events-replay"
                )
        return self

    @model_validator(mode="after")
    def _what_each_needs(self) -> RouterSettings:
        if self.max_predicted_ttft_s and self.policy != Planner.name:
            raise ValueError("--max-predicted-ttft is of use only with --policy planner")
        if self.salt_from_key and not (self.api_key or self.api_key_file or self.trusted_proxies):
            raise ValueError(
                "--salt-from-key needs tenants: give --api-key-file, or --trusted-proxies with "
                "--tenant-header"
            )
        return self

    @model_validator(mode="after")
    def _some_engine(self) -> RouterSettings:
        if not (self.decode or self.admin or self.discovery):
            raise ValueError(
                "no engine for decode legs: give --decode URL (and --prefill URL), or --discovery"
            )
        return self

    @property
    def life_limits(self) -> LifeLimits:
        """When an engine is dead: after so many checks in a row without an answer."""
        checks = self.health_failure_threshold
        silence_s = checks * max(self.health_interval_s, self.health_timeout_s)
        return LifeLimits(self.engine_stall_timeout_s, silence_s, checks)

    @property
    def engines(self) -> dict[str, Role]:
        """The role of each named engine, by its address."""
        said = [(address, Role.PREFILL) for address in self.prefill]
        return both_roles([*said, *((address, Role.DECODE) for address in self.decode)])

    @property
    def members(self) -> dict[str, Role]:
        """The same, with the nodes of `--store`."""
        return {**self.engines, **dict.fromkeys(self.store_nodes, Role.STORE)}

    @property
    def session_header(self) -> str | None:
        """`session_key` as headers are looked up."""
        return self.session_key and self.session_key.lower()

    @property
    def bootstrap_ports(self) -> dict[str, int]:
        """Bootstrap ports by the engine's address; under "" that of all others."""
        return by_engine(self.bootstrap_port)

    @property
    def rank_counts(self) -> dict[str, int]:
        """Data-parallel ranks by the engine's address; under "" those of all others."""
        return by_engine(self.data_parallel_size)

    @property
    def sent_ahead_blocks(self) -> int | None:
        """New blocks that must land before the decode leg; None: it waits for all of them."""
        if not self.has_nodes or self.decode_dispatch == "landing":
            return None
        return self.dispatch_chunk_blocks if self.decode_dispatch == "chunk" else 0

    @property
    def store_nodes(self) -> list[str]:
        """URLs of the store's nodes; empty without a store, or with one of another project."""
        return [url for url in self.store if not is_foreign(url)]

    @property
    def has_nodes(self) -> bool:
        """Whether there is a store of nodes, even if none is known yet."""
        return bool(self.store_nodes) or self.store_discovery
