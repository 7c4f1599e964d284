"""Settings of a simulated engine.

Flags that llm-d-inference-sim has carry its names and meaning
(github.com/llm-d/llm-d-inference-sim, docs/configuration.md); those of vLLM carry vLLM's.
"""

import re
from contextlib import suppress
from math import inf
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import SettingsConfigDict

from kvrouter.options.settings import Settings, StoreAccess
from kvrouter.options.types import LogLevel, Percent, Port, StoreUrl, Texts
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.tls import native_context
from kvrouter_store.connectors.neighbours import Sources
from kvrouter_store.events.settings import KVEvents, KVEventsConfig
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.identity.layout import Layout
from kvrouter_store.node.settings import RdmaSettings

DEFAULT_CONTEXT_TOKENS = 32768
FAILURES: Final = {
    "rate_limit": (429, "Rate limit reached", None),
    "invalid_api_key": (401, "Incorrect API key", None),
    "context_length": (400, "This model's maximum context length is exceeded", "messages"),
    "server_error": (500, "The server had an error", None),
    "invalid_request": (400, "Invalid request", None),
    "model_not_found": (404, "The model does not exist", "model"),
}
"""Status, message and parameter of failures on purpose: kinds of llm-d-inference-sim."""
_PIECE = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(float):
    """Seconds. Written as Go writes it ("100ms", "1m30s"); a bare number is milliseconds."""

    metavar = "DURATION"

    def __format__(self, spec: str) -> str:
        return f"{self * 1000:g}ms" if self < 1 else f"{float(self):g}s"

    @classmethod
    def parse(cls, value: object) -> "Duration":
        """Read a duration. ValueError for anything else, and for a negative one."""
        if isinstance(value, Duration):
            return value
        text = str(value).strip()
        pieces = _PIECE.findall(text)
        if pieces and "".join(map("".join, pieces)) == text:
            return cls(sum(float(number) * _UNIT_S[unit] for number, unit in pieces))
        with suppress(ValueError):
            if 0 <= float(text) < inf:
                return cls(float(text) / 1000)
        raise ValueError(f"a duration is written as 100ms or 1.5s, not {value!r}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(float)
        )


Tokens = Annotated[int, Field(ge=1, json_schema_extra={"metavar": "TOKENS"})]
_MOST_SPREAD: Final = 0.3
_SPREADS: Final = "time_to_first_token", "inter_token_latency", "kv_cache_transfer_latency"
"""Times whose standard deviation is at most that share of them."""


def _time(description: str, **extra: str) -> Any:
    return Field(default=Duration(0), description=description, json_schema_extra={**extra})


def _spread(flag: str) -> Any:
    return _time(f"Standard deviation of {flag}, at most 30 percent of it.")


class SimSettings(StoreAccess, RdmaSettings, Settings):
    """One simulated engine: what it serves, how fast it seems to be, and how it fails."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_SIM_", frozen=True)

    model: str = Field(description="Name of the model that the engine serves.")
    role: Literal["prefill", "decode", "both"] = Field(
        default="both",
        description="What the engine does with blocks. prefill: load and save those of prompts. "
        "decode: only load. both: load, and save those of answers too.",
        json_schema_extra={"section": "Engine"},
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(default=8000, description="Port to listen on; 0 takes a free one.")
    served_model_name: Texts = Field(
        default_factory=list,
        description="Names under which the engine serves the model, instead of --model.",
        json_schema_extra={"metavar": "NAME"},
    )
    block_size: Tokens = Field(default=64, le=1024, description="Tokens in a block.")
    kv_cache_size: int = Field(
        default=1024,
        ge=1,
        description="Size of the engine's own cache.",
        json_schema_extra={"metavar": "BLOCKS"},
    )
    kv_offloading_size: float = Field(
        default=0, ge=0, description="GiB of host memory for blocks, as vLLM's flag."
    )
    kv_bytes_per_token: int = Field(
        default=1024,
        ge=16,
        le=1 << 20,
        description="KV of one token; the engine really moves these bytes.",
        json_schema_extra={"metavar": "BYTES"},
    )
    weights_revision: str = Field(
        default="sim",
        description="Revision of the weights; engines share KV only if their revisions are equal.",
        json_schema_extra={"metavar": "NAME"},
    )
    hash_seed: str | None = Field(
        default=None,
        description="Seed of the block hashes, as PYTHONHASHSEED is for vLLM.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt plus answer. By default what the cache holds, at most 32768.",
        json_schema_extra={"metavar": "TOKENS"},
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="Requests that run at once; others wait."
    )
    max_waiting_queue_length: int = Field(
        default=1000, ge=0, description="Requests that may wait; further ones are answered 429."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="Which waiting request runs next. fcfs: the oldest. priority: the one with "
        "the lowest `priority`, and the oldest of equals.",
    )
    max_num_batched_tokens: Tokens = Field(
        default=2048,
        description="Prompt tokens of one step; the engine saves blocks after each step.",
    )
    shared_steps: bool = Field(
        default=False,
        description="Compute prompts step by step, one after the other, and let the next tokens "
        "of answers wait for the step, as one device does. Otherwise requests slow each other "
        "down only by --time-factor-under-load.",
    )
    enable_scale_out: bool = Field(
        default=False,
        description="Serve /v1/messages/render and /v1/responses/render, as vLLM does by this "
        "flag: the router then sends messages and responses through both legs.",
    )
    log_level: LogLevel = Field(default="info", description="Lowest severity that the engine logs.")

    store: StoreUrl = Field(
        default=None,
        description="KV store to load from and save to: kv://HOST:PORT, or kvs://HOST:PORT for "
        "TLS.",
        json_schema_extra={"section": "KV store"},
    )
    store_transport: TransportName = Field(
        default="auto",
        description="How blocks travel. auto: the first of shm, unix, rdma and tcp that works; "
        "rdma needs a device on this host.",
        json_schema_extra={"flags": ["--transport"]},
    )
    store_neighbours: str = Field(
        default="",
        description="Other nodes of the store, from which the engine reads where a request names "
        "them: HOST:PORT or URLs with commas between, or any.",
        json_schema_extra={"metavar": "NODES"},
    )
    store_deadline: Duration = Field(
        default=Duration(2), description="Longest time of one operation of the store."
    )
    verify_kv: bool = Field(
        default=True,
        description="Compare every loaded block with the bytes that its hash stands for.",
    )

    time_to_first_token: Duration = _time(
        "Time of a prefill, as 100ms; a bare number is milliseconds.", section="Times"
    )
    time_to_first_token_std_dev: Duration = _spread("--time-to-first-token")
    inter_token_latency: Duration = _time("Time of each further token.")
    inter_token_latency_std_dev: Duration = _spread("--inter-token-latency")
    prefill_overhead: Duration = _time(
        "Constant part of a prefill's time; only without --time-to-first-token."
    )
    prefill_time_per_token: Duration = _time(
        "Time per computed prompt token; only without --time-to-first-token."
    )
    prefill_time_std_dev: Duration = _time(
        "Standard deviation of a prefill's time; only without --time-to-first-token."
    )
    kv_cache_transfer_latency: Duration = _time(
        "Time of a load from the store, instead of the prefill's."
    )
    kv_cache_transfer_latency_std_dev: Duration = _spread("--kv-cache-transfer-latency")
    kv_cache_transfer_time_per_token: Duration = _time(
        "Time per loaded token; only without --kv-cache-transfer-latency."
    )
    kv_cache_transfer_time_std_dev: Duration = _time(
        "Standard deviation of a load's time; only without --kv-cache-transfer-latency."
    )
    time_factor_under_load: float = Field(
        default=1.0,
        ge=1.0,
        description="Factor of all times while --max-num-seqs requests run.",
        json_schema_extra={"metavar": "FACTOR"},
    )
    seed: int | None = Field(
        default=None,
        description="Seed of times and failures. By default the clock.",
    )

    failure_injection_rate: Percent = Field(
        default=0,
        description="Share of the requests that fail on purpose.",
        json_schema_extra={"section": "Failures", "metavar": "PERCENT"},
    )
    failure_types: Texts = Field(
        default_factory=list,
        description=f"Kinds of failure to inject, of {', '.join(FAILURES)}. By default all.",
        json_schema_extra={"metavar": "KIND"},
    )
    kv_corruption_rate: Percent = Field(
        default=0,
        description="Share of the loads from the store that change one byte of the KV, as a "
        "broken transport does. With --no-verify-kv the engine answers from it.",
    )

    kv_events_config: KVEvents = KVEventsConfig()
    kv_events_endpoint: str | None = Field(
        default=None,
        description="Where KV events go, tcp://HOST:PORT: the short form of --kv-events-config.",
        json_schema_extra={"flags": ["--zmq-endpoint"], "metavar": "URL"},
    )
    advertise: str | None = Field(
        default=None,
        description="Name of this engine at the router, for the topic of its events. By default "
        "the address where it listens.",
        json_schema_extra={"metavar": "HOST:PORT"},
    )
    kv_events_lost: Percent = Field(default=0, description="Share of the messages that get lost.")
    kv_events_repeated: Percent = Field(
        default=0, description="Share of the messages that arrive twice."
    )
    kv_events_late: Percent = Field(
        default=0, description="Share of the messages that the next message overtakes."
    )

    @field_validator("failure_types")
    @classmethod
    def _known_failures(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in FAILURES:
                raise ValueError(f"{name!r} is no failure: give {', '.join(FAILURES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "SimSettings":
        for name in _SPREADS:
            most = _MOST_SPREAD * getattr(self, name) + 1e-12
            if getattr(self, f"{name}_std_dev") > most:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}-std-dev is more than 30 percent of {flag}")
        if self.max_model_len is not None and self.cache_tokens < self.max_model_len:
            raise ValueError(
                f"--kv-cache-size {self.kv_cache_size} blocks cannot hold a request of "
                f"--max-model-len {self.max_model_len} tokens: raise one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _files_that_can_be_used(self) -> "SimSettings":
        if self.store is not None:
            native_context(parse_url(self.store), self.store_tls)
            _ = self.store_sources
        return self

    @property
    def store_sources(self) -> Sources:
        """Which nodes of the store a request may name."""
        return Sources.of(self.store_neighbours, self.store or "")

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV the engine's own cache holds."""
        return self.kv_cache_size * self.block_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt plus answer."""
        return self.max_model_len or min(self.cache_tokens, DEFAULT_CONTEXT_TOKENS)

    @property
    def block_bytes(self) -> int:
        """Bytes of KV of one block."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def root(self) -> bytes:
        """Of the names of blocks."""
        return root_hash(self.hash_seed)

    @property
    def manifest(self) -> Manifest:
        """Of the engine's KV: one opaque part for each block."""
        spec = CacheSpec(
            model=self.model,
            weights_revision=self.weights_revision,
            kv_dtype="sim",
            block_tokens=self.block_size,
            hash_algo="sha256_cbor",
            root=self.root.hex(),
        )
        part = Part((0, 1), (0, 1), 0, self.block_bytes, Layout.opaque("kvrouter-sim/1"))
        return Manifest(spec, (part,))

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which the model is asked for, the first one its own."""
        return tuple(self.served_model_name) or (self.model,)

    @property
    def events_endpoint(self) -> str | None:
        """Where KV events go; None for nowhere."""
        return self.kv_events_endpoint or self.kv_events_config.address()
