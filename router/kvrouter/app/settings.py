"""Settings of the router: flags > environment > YAML file > default.

Read once at start; nothing else in kvrouter reads the environment. What belongs together stands as
a plain pydantic model beside what it is for, from which `RouterSettings` inherits its fields.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvrouter.access.ports_settings import PortSettings
from kvrouter.access.settings import AccessSettings
from kvrouter.admission.settings import TenantSettings
from kvrouter.app.drain_settings import DrainSettings
from kvrouter.app.toy_proxy import ToyProxySettings
from kvrouter.canary.settings import CanarySettings
from kvrouter.engines.engine import Role
from kvrouter.http.server.limits import Limits
from kvrouter.membership.discovery.settings import DiscoverySettings
from kvrouter.options.addresses import parse_address
from kvrouter.options.by_engine import by_engine
from kvrouter.options.types import Texts  # noqa: TC001 (pydantic reads it)
from kvrouter.prefix.events.settings import KvEventSettings
from kvrouter.prefix.tokenize import tokenizer_file
from kvrouter.redis.settings import RedisSettings
from kvrouter.telemetry.settings import ObservabilitySettings
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.tls import ClientTls, native_context
from kvrouter_store.node.settings import (  # noqa: TC001 (pydantic reads them)
    StoreCaFile,
    StoreCertFile,
    StoreKeyFile,
    StoreToken,
)
from kvrouter_store.node.start_checks import is_loopback


class RouterSettings(
    AccessSettings,
    KvEventSettings,
    PortSettings,
    DrainSettings,
    TenantSettings,
    DiscoverySettings,
    CanarySettings,
    RedisSettings,
    ObservabilitySettings,
    ToyProxySettings,
    BaseSettings,
):
    """Settings of `kvrouter serve`: its own, and those of the groups.

    A field `some_name` is the flag `--some-name`, the environment's `KVROUTER_SOME_NAME` and the
    YAML file's `some_name`; `json_schema_extra={"flags": [...]}` adds spellings of the flag.
    """

    model_config = SettingsConfigDict(env_prefix="KVROUTER_", extra="forbid")

    prefill: Texts = Field(
        default_factory=list,
        description="Engines for prefill legs, as URL or HOST:PORT; repeat it or give a list. "
        "An engine named here and under --decode takes both legs.",
    )
    decode: Texts = Field(
        default_factory=list,
        description="Engines for decode legs, as URL or HOST:PORT; repeat it or give a list.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    model: str | None = Field(
        default=None,
        description="Name of the one model to serve; requests for others are answered 404. "
        "By default every model that the engines' /v1/models name.",
    )
    store: str | None = Field(
        default=None,
        description="KV store that the engines' connectors use, as kv://HOST:PORT, or "
        "kvs://HOST:PORT for TLS. Without it the router awaits no landing; the engines' own "
        "connectors still hand KV over.",
    )
    store_token: StoreToken = Field(
        default=SecretStr(""),
        description="token of the store, where it asks for one; better given in the environment "
        "than as a flag, which others can see.",
    )
    store_ca_file: StoreCaFile = ""
    store_cert_file: StoreCertFile = ""
    store_key_file: StoreKeyFile = ""
    kv_connector: Literal[
        "auto", "store", "nixl", "mooncake", "mooncake-legacy", "sglang", "openai"
    ] = Field(
        default="auto",
        description="How the engines hand KV over: store (kvrouter's connector, LMCache, "
        "MooncakeStore), nixl and mooncake (vLLM's NixlConnector and MooncakeConnector; "
        "mooncake-legacy where /version does not tell that it is vLLM before 0.14), sglang, or not "
        "at all: openai. auto asks each engine what it is.",
    )
    bootstrap_port: Texts = Field(
        default_factory=list,
        description="Port at which decode engines find a prefill engine of SGLang or "
        "MooncakeConnector, as PORT for all or HOST:PORT=PORT for one. By default SGLang's "
        "/server_info tells it, and 8998 is taken for MooncakeConnector.",
    )
    data_parallel_size: Texts = Field(
        default_factory=list,
        description="Data-parallel ranks of an engine, as N for all or HOST:PORT=N for one. Each "
        "is chosen, counted and named (HOST:PORT@RANK) as an engine of its own; with 1 the engine "
        "spreads requests over them itself. By default vLLM's metrics and SGLang's /server_info "
        "tell.",
        json_schema_extra={"flags": ["--intra-node-data-parallel-size"]},
    )
    policy: Literal["round_robin", "least_tokens", "prefix"] = Field(
        default="prefix",
        description="How engines are chosen: round_robin in turn, least_tokens by tokens under "
        "way, prefix also by what each engine and the store already hold.",
    )
    prefill_threshold: int = Field(
        default=0,
        ge=0,
        description="Skip the prefill leg where the decode engine has no more prompt tokens than "
        "this to compute at a time, those of other requests counted; what it holds or can load "
        "is not computed.",
    )
    prefill_priority: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Send an estimate of each prefill leg's work as its `priority`, so that vLLM "
        "with --scheduling-policy priority begins with the shortest: to engines that took one when "
        "they joined (auto), to all (on) or to none (off). A client's own priority comes first.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="A tokenizer.json, or the directory of a model that has one, to tokenise text "
        "prompts in the router (needs kvrouter[tokenizers]). By default an engine's /tokenize "
        "is asked.",
    )
    landing_timeout_s: float = Field(
        default=2.0,
        gt=0,
        le=600,
        description="Seconds to wait, after the prefill leg's answer, for its KV to be in the "
        "store.",
        json_schema_extra={"flags": ["--landing-timeout"]},
    )
    decode_dispatch: Literal["landing", "chunk", "at-once"] = Field(
        default="landing",
        description="When the decode leg is sent: landing, once the prompt's KV is in the store; "
        "chunk, once the first of it is; at-once, together with the prefill leg. In the latter two "
        "the decode engine waits and loads what lands while the rest is computed.",
    )
    dispatch_chunk_blocks: int = Field(
        default=1,
        ge=1,
        description="With --decode-dispatch chunk: blocks, behind those that the store held "
        "before, whose landing sends the decode leg.",
    )
    request_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that an engine may take until the first byte of its answer, and "
        "between two bytes of it.",
        json_schema_extra={"flags": ["--request-timeout"]},
    )
    max_concurrent_requests: int = Field(
        default=4096,
        ge=1,
        description="Requests under way at a time; further ones wait in the queue.",
    )
    queue_size: int = Field(
        default=100,
        ge=0,
        description="Requests that may wait for others to end, and as many again for a decode "
        "engine to come; further ones are answered 429 (for an engine: 503) with Retry-After.",
    )
    queue_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a request may wait in the queue; then it is answered 503.",
        json_schema_extra={"flags": ["--queue-timeout", "--queue-timeout-secs"]},
    )
    engine_wait_s: float = Field(
        default=10.0,
        ge=0,
        description="Seconds that a request waits for a decode engine where none is there for a "
        "moment, as while engines restart; then it is answered 503.",
        json_schema_extra={"flags": ["--engine-wait"]},
    )
    model_retention_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds that a model stays known after the last engine that served it left: "
        "requests for it wait for an engine (--engine-wait) and are answered 503; after that, 404.",
        json_schema_extra={"flags": ["--model-retention"]},
    )
    max_choices: int = Field(
        default=1024,
        ge=1,
        description="Choices, prompts times n, that one request may ask for; more are answered "
        "400. Each prompt of a list counts as a request under way.",
    )
    max_body_memory: ByteSize = Field(
        default=ByteSize(Limits().body_memory_bytes),
        gt=0,
        description="Memory for request bodies of which a part has come, as 512MiB; a request "
        "whose body would take more is answered 503 with Retry-After.",
    )
    recompute_budget_tokens: int = Field(
        default=131072,
        ge=0,
        description="Prompt tokens that decode engines may compute at a time because their KV did "
        "not land; requests beyond it are answered 429 with Retry-After.",
        json_schema_extra={"flags": ["--recompute-budget"]},
    )
    resume_streams: bool = Field(
        default=False,
        description="Let a stream whose engine dies go on at another one, where nothing but its "
        "tokens tells how it goes on. Costs a few microseconds of CPU for each event of such "
        "streams.",
    )
    health_interval_s: float = Field(
        default=2.0, gt=0, description="Seconds between two health checks of an engine."
    )
    health_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that an engine may take to answer a health check."
    )
    admin: bool = Field(
        default=False,
        description="Serve /workers, which shows, adds and drains engines. Beyond loopback it "
        "needs --admin-token.",
    )
    admin_token: SecretStr = Field(
        default=SecretStr(""),
        description="Token that /workers asks for, as Authorization: Bearer; better given in the "
        "environment than as a flag, which others can see.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(parse_address(item) for item in value))

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_that_is_there(cls, value: str | None) -> str | None:
        if value is not None:
            tokenizer_file(value)
        return value

    @field_validator("bootstrap_port")
    @classmethod
    def _bootstrap_ports(cls, value: list[str]) -> list[str]:
        by_engine(value, 65535, "bootstrap port {!r}: give it as PORT or HOST:PORT=PORT")
        return value

    @field_validator("data_parallel_size")
    @classmethod
    def _rank_counts(cls, value: list[str]) -> list[str]:
        by_engine(value, 4096, "data-parallel size {!r}: give it as N or HOST:PORT=N")
        return value

    @field_validator("store")
    @classmethod
    def _store_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_url(value)
        return value

    @model_validator(mode="after")
    def _files_that_can_be_used(self) -> RouterSettings:
        if self.store is not None:
            native_context(parse_url(self.store), self.store_tls)
        return self

    @model_validator(mode="after")
    def _admin_behind_a_token(self) -> RouterSettings:
        host = self.admin_host or self.host
        if self.admin and not self.admin_token.get_secret_value() and not is_loopback(host):
            raise ValueError(
                f"whoever reaches {host} could add and remove engines by /workers: give "
                "--admin-token TOKEN, or listen on --host 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _paired_engines(self) -> RouterSettings:
        self.prefill = self._addresses([*self.prefill, *self.paired_prefill])
        self.decode = self._addresses([*self.decode, *self.paired_decode])
        return self

    @model_validator(mode="after")
    def _redis_to_discover_by(self) -> RouterSettings:
        if "redis" in self.discovery and not self.redis.get_secret_value():
            raise ValueError("--discovery redis: say by --redis redis://HOST:PORT/DB which one")
        return self

    @model_validator(mode="after")
    def _some_engine(self) -> RouterSettings:
        if not (self.decode or self.admin or self.discovery):
            raise ValueError(
                "no engine for decode legs: give --decode URL (a --prefill URL beside it), or "
                "--discovery"
            )
        return self

    @property
    def engines(self) -> dict[str, Role]:
        """The role of each engine that is named, by its address."""
        both = {a: Role.BOTH for a in self.prefill if a in self.decode}
        one = dict.fromkeys(self.prefill, Role.PREFILL) | dict.fromkeys(self.decode, Role.DECODE)
        return one | both

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
        """Blocks whose landing sends the decode leg ahead of the rest; None: it goes after all."""
        if self.store is None or self.decode_dispatch == "landing":
            return None
        return self.dispatch_chunk_blocks if self.decode_dispatch == "chunk" else 0

    @property
    def store_tls(self) -> ClientTls:
        """What a store under TLS is shown, and who must have signed what it shows."""
        return ClientTls(self.store_ca_file, self.store_cert_file, self.store_key_file)
