"""Settings of a simulated engine: flags > environment (KVROUTER_SIM_*) > YAML file > defaults.

Flags that llm-d-inference-sim has carry its names and meaning
(github.com/llm-d/llm-d-inference-sim, docs/configuration.md); those of vLLM carry vLLM's.
"""

import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvrouter.tools.sim.failures import FAILURES
from kvrouter_store.client.blocking import TransportName
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.tls import ClientTls, native_context
from kvrouter_store.node.settings import (
    RDMA,
    RdmaDevName,
    RdmaGidIndex,
    RdmaIbPort,
    RdmaLinkType,
    StoreCaFile,
    StoreCertFile,
    StoreKeyFile,
    StoreToken,
)
from kvrouter_store.rdma.options import RdmaOptions

__all__ = ["Duration", "KVEventsConfig", "SimSettings"]

DEFAULT_CONTEXT_TOKENS = 32768
_PIECE = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(float):
    """Seconds. Written as Go writes it ("100ms", "1m30s"); a bare number is milliseconds."""

    def __format__(self, spec: str) -> str:
        return f"{self * 1000:g}ms" if self < 1 else f"{float(self):g}s"

    @classmethod
    def parse(cls, value: object) -> "Duration":
        """Read a duration. ValueError for anything that is none, or is negative."""
        if isinstance(value, Duration):
            return value
        try:
            return cls._milliseconds(float(str(value)))
        except ValueError:
            pieces = _PIECE.findall(str(value).strip())
        if not pieces or "".join(map("".join, pieces)) != str(value).strip():
            raise ValueError(f"a duration is written as 100ms or 1.5s, not {value!r}")
        return cls(sum(float(number) * _UNIT_S[unit] for number, unit in pieces))

    @classmethod
    def _milliseconds(cls, number: float) -> "Duration":
        if not 0 <= number < float("inf"):
            raise ValueError("a duration is not negative")
        return cls(number / 1000)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(float)
        )


class KVEventsConfig(BaseModel):
    """vLLM's `--kv-events-config`, as far as the simulator has it. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    topic: str | None = None

    def address(self) -> str | None:
        """Where events go; None where they are not enabled."""
        return self.endpoint if self.enable_kv_cache_events else None


def _events_config(value: object) -> object:
    return orjson.loads(value) if isinstance(value, str) else value


class SimSettings(BaseSettings):
    """One simulated engine: what it serves, how fast it claims to be, and how it fails."""

    model_config = SettingsConfigDict(
        env_prefix="KVROUTER_SIM_", extra="forbid", frozen=True, validate_default=True
    )

    role: Literal["prefill", "decode", "both"] = Field(
        default="both",
        description="prefill: loads and saves the prompt's blocks; decode: only loads; "
        "both: loads, and saves the answer's blocks too",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one"
    )
    model: str = Field(description="name of the model that it claims to serve")
    served_model_name: list[str] = Field(
        default_factory=list, description="names under which the model is served instead of --model"
    )
    store: str | None = Field(
        default=None,
        description="KV store to load from and save to: kv://HOST:PORT, or kvs://HOST:PORT for TLS",
    )
    store_token: StoreToken = Field(
        default=SecretStr(""),
        description="token of the store, where it asks for one; better given in the environment "
        "than as a flag, which others can see",
    )
    store_ca_file: StoreCaFile = ""
    store_cert_file: StoreCertFile = ""
    store_key_file: StoreKeyFile = ""
    store_transport: TransportName = Field(
        default="auto",
        description="how blocks travel: auto takes the first that can be had of shm, unix, rdma "
        "and tcp; rdma needs a device here",
        json_schema_extra={"flags": ["--transport"]},
    )
    dev_name: RdmaDevName = RDMA.dev_name
    ib_port: RdmaIbPort = RDMA.ib_port
    link_type: RdmaLinkType = RDMA.link_type
    hint_gid_index: RdmaGidIndex = RDMA.hint_gid_index
    store_deadline: Duration = Field(
        default=Duration(2), description="how long one operation of the store may take, as 2s"
    )
    verify_kv: bool = Field(
        default=True,
        description="compare every loaded block with the bytes that its hash stands for",
    )
    block_size: int = Field(default=64, ge=1, le=1024, description="tokens in a block")
    kv_cache_size: int = Field(default=1024, ge=1, description="blocks in the engine's own cache")
    kv_bytes_per_token: int = Field(
        default=1024, ge=16, le=1 << 20, description="bytes of KV of a token: what really is moved"
    )
    weights_revision: str = Field(
        default="sim", description="revision of the weights: engines share KV only under equal ones"
    )
    hash_seed: str | None = Field(
        default=None, description="seed of the block hashes; what PYTHONHASHSEED is to vLLM"
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="longest prompt plus answer, in tokens; none: what its cache holds, to 32768",
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="requests that run at once; others wait"
    )
    max_waiting_queue_length: int = Field(
        default=1000, ge=0, description="requests that may wait; further ones are answered 429"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="who of those that wait runs next: fcfs the first that came, priority the one "
        "with the lowest `priority`, the first of equals",
    )
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=1,
        description="prompt tokens of one step: blocks are saved after each step",
    )
    shared_steps: bool = Field(
        default=False,
        description="compute prompts step by step, one after the other, and let the next tokens of "
        "answers wait for the step, as one device does; otherwise requests slow each other by "
        "--time-factor-under-load alone",
    )

    time_to_first_token: Duration = Field(
        default=Duration(0),
        description="time of a prefill, as 100ms; a bare number is milliseconds",
    )
    time_to_first_token_std_dev: Duration = Field(
        default=Duration(0), description="its standard deviation: at most 30 percent of it"
    )
    inter_token_latency: Duration = Field(
        default=Duration(0), description="time of each further token"
    )
    inter_token_latency_std_dev: Duration = Field(
        default=Duration(0), description="its standard deviation: at most 30 percent of it"
    )
    prefill_overhead: Duration = Field(
        default=Duration(0),
        description="constant part of a prefill's time; only without --time-to-first-token",
    )
    prefill_time_per_token: Duration = Field(
        default=Duration(0),
        description="time per prompt token computed; only without --time-to-first-token",
    )
    prefill_time_std_dev: Duration = Field(
        default=Duration(0),
        description="standard deviation of a prefill's time; without --time-to-first-token",
    )
    kv_cache_transfer_latency: Duration = Field(
        default=Duration(0),
        description="time that loading from the store takes, instead of the prefill's",
    )
    kv_cache_transfer_latency_std_dev: Duration = Field(
        default=Duration(0), description="its standard deviation: at most 30 percent of it"
    )
    kv_cache_transfer_time_per_token: Duration = Field(
        default=Duration(0),
        description="time per token loaded; only without --kv-cache-transfer-latency",
    )
    kv_cache_transfer_time_std_dev: Duration = Field(
        default=Duration(0),
        description="its standard deviation; only without --kv-cache-transfer-latency",
    )
    time_factor_under_load: float = Field(
        default=1.0,
        ge=1.0,
        description="all times are this much longer with --max-num-seqs requests",
    )
    seed: int | None = Field(
        default=None, description="seed of latencies and failures; none: the clock's"
    )

    failure_injection_rate: int = Field(
        default=0, ge=0, le=100, description="share of requests that fail on purpose, in percent"
    )
    failure_types: list[str] = Field(
        default_factory=list,
        description="kinds of failure to inject: " + ", ".join(FAILURES) + "; none named: any",
    )

    kv_corruption_rate: int = Field(
        default=0,
        ge=0,
        le=100,
        description="share of loads from the store after which a byte of the KV is wrong, in "
        "percent, as with a broken transport; --no-verify-kv answers from it",
    )

    kv_events_config: Annotated[KVEventsConfig, NoDecode, BeforeValidator(_events_config)] = Field(
        default_factory=KVEventsConfig,
        description="vLLM's JSON: enable_kv_cache_events, endpoint, replay_endpoint, buffer_steps, "
        "topic",
    )
    kv_events_lost: int = Field(
        default=0, ge=0, le=100, description="share of the messages that get lost, in percent"
    )
    kv_events_repeated: int = Field(
        default=0, ge=0, le=100, description="share of the messages that come twice, in percent"
    )
    kv_events_late: int = Field(
        default=0,
        ge=0,
        le=100,
        description="share of the messages that the next one overtakes, in percent",
    )
    kv_events_endpoint: str | None = Field(
        default=None,
        description="where KV events go, tcp://HOST:PORT: the short form of --kv-events-config",
        json_schema_extra={"flags": ["--zmq-endpoint"]},
    )
    advertise: str | None = Field(
        default=None,
        description="HOST:PORT under which the router knows this engine, the topic of its events; "
        "none: where it listens",
    )
    log_level: Literal["error", "warning", "info", "debug"] = Field(
        default="info", description="how much is logged"
    )

    @field_validator("store")
    @classmethod
    def _store_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_url(value)
        return value

    @field_validator("failure_types")
    @classmethod
    def _known_failures(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in FAILURES:
                raise ValueError(f"{name!r} is none of {', '.join(FAILURES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "SimSettings":
        for name, mean in (
            ("time_to_first_token", self.time_to_first_token),
            ("inter_token_latency", self.inter_token_latency),
            ("kv_cache_transfer_latency", self.kv_cache_transfer_latency),
        ):
            if getattr(self, f"{name}_std_dev") > 0.3 * mean + 1e-12:
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
        _ = self.rdma_options
        return self

    @property
    def rdma_options(self) -> RdmaOptions:
        """Which RDMA device to use. ValueError where that cannot be meant."""
        return RdmaOptions(self.dev_name, self.ib_port, self.link_type, self.hint_gid_index)

    @property
    def store_tls(self) -> ClientTls:
        """What a store under TLS is shown, and who must have signed what it shows."""
        return ClientTls(self.store_ca_file, self.store_cert_file, self.store_key_file)

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
    def served_names(self) -> tuple[str, ...]:
        """The names under which the model is asked for, the first one its own."""
        return tuple(self.served_model_name) or (self.model,)

    @property
    def events_endpoint(self) -> str | None:
        """Where KV events go; None where nobody asked for them."""
        return self.kv_events_endpoint or self.kv_events_config.address()
