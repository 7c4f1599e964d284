"""Settings of a store node, and the types of settings that clients of a node share."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvrouter_store._core import DISK_IO_KINDS, EVICTION_POLICIES
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.events.settings import KVEvents, KVEventsConfig
from kvrouter_store.node.quotas import quota_bytes, split_quotas
from kvrouter_store.rdma.options import LINK_TYPES, NO_HINT, RdmaOptions

KIB = 1024
MIB = 1024 * KIB
GONE_POLICY = "s3fifo"  # still taken for --eviction, and means the default
SECONDS_POLICY = "density-seconds"  # --eviction density with --eviction-objective seconds
POLICIES = tuple(name for name in EVICTION_POLICIES if name != SECONDS_POLICY)
MODE = re.compile(r"0?[67][0-7][0-7]")


def _secret(value: Any) -> SecretStr:
    given = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    return SecretStr(check_token(given))


def _mode(value: object) -> str:
    """A bare number is refused: YAML reads 0660 as 432."""
    if isinstance(value, str) and MODE.fullmatch(value):
        return value.zfill(4)
    raise ValueError("write four octal digits in quotes that let the owner in, as '0660'")


def _urls(value: Any) -> Any:
    """Texts of URLs, as a list of URLs. There may be commas in a URL too."""
    if isinstance(value, str):
        return [each for each in re.split(r"[,\s]+(?=[\w+]+://|$)", value) if each]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [url for one in value for url in _urls(one)]
    return value


StoreToken = Annotated[SecretStr, BeforeValidator(_secret)]
Quotas = Annotated[list[str], BeforeValidator(split_quotas)]
StoreCaFile = Annotated[
    str,
    Field(
        description="PEM file of the CA that signed the certificate of a store at kvs://. By "
        "default the CAs that this machine trusts."
    ),
]
StoreCertFile = Annotated[
    str, Field(description="PEM file of the certificate to show to the store, if it needs one.")
]
LogFormat = Annotated[
    Literal["auto", "text", "json"],
    Field(description="How log lines are written. auto: text on a terminal, else JSON."),
]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RDMA = RdmaOptions()
StoreKeyFile = Annotated[str, Field(description="PEM file of the key of --store-cert-file.")]


class RdmaSettings(BaseModel):
    """Which RDMA devices to use, of a node and of its clients."""

    dev_name: str = Field(
        default=RDMA.dev_name,
        description="RDMA device, as ibv_devices lists it. Several devices, each with or without "
        "the index of a GID (mlx5_1:6,mlx5_2:7): each serves as many consecutive GPUs of an "
        "engine's host. By default the first usable device.",
        json_schema_extra={"section": "RDMA", "metavar": "NAME"},
    )
    ib_port: int = Field(default=RDMA.ib_port, ge=1, le=255, description="Port of the RDMA device.")
    link_type: str = Field(
        default=RDMA.link_type,
        description=f"Link type that the port must have: {' or '.join(LINK_TYPES)}. By default "
        "any.",
        json_schema_extra={"metavar": "TYPE"},
    )
    hint_gid_index: int = Field(
        default=RDMA.hint_gid_index,
        ge=NO_HINT,
        le=255,
        description="Index of the GID for RDMA devices without an index of their own; "
        f"{NO_HINT}: choose one.",
        json_schema_extra={"metavar": "INDEX"},
    )

    @model_validator(mode="after")
    def _usable_devices(self) -> Self:
        _ = self.rdma_options
        return self

    @property
    def rdma_options(self) -> RdmaOptions:
        """The devices. ValueError if the settings contradict each other."""
        return RdmaOptions(self.dev_name, self.ib_port, self.link_type, self.hint_gid_index)


class StoreSettings(RdmaSettings, BaseSettings):
    """One store node."""

    model_config = SettingsConfigDict(
        env_prefix="KVROUTER_STORE_",
        extra="forbid",
        frozen=True,
        validate_default=True,
        enable_decoding=False,
    )

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, for clients and for HTTP.",
        json_schema_extra={"section": "Ports"},
    )
    port: Port = Field(
        default=7400,
        description="Port for clients; 0 takes a free one.",
        json_schema_extra={"flags": ["--service-port"]},
    )
    http_port: Port = Field(
        default=7480,
        description="Port of /healthz, /metrics, /stats and /purge; 0 takes a free one.",
        json_schema_extra={"flags": ["--manage-port"]},
    )
    unix_socket: str = Field(
        default="",
        description="Path of the Unix socket through which clients of this host map the pool; "
        "'none' makes no socket. By default the node makes one in the run-time directory.",
        json_schema_extra={"metavar": "PATH"},
    )
    unix_socket_mode: Annotated[str, BeforeValidator(_mode)] = Field(
        default="0600",
        description="Permissions of the Unix socket, as octal digits: 0600 for this user, 0660 for "
        "its group too. Every process that may use the socket maps the pool.",
        json_schema_extra={"metavar": "MODE"},
    )
    memory: ByteSize = Field(
        default=ByteSize(512 * MIB),
        description="Size of the pool of KV blocks, as 8GiB.",
        json_schema_extra={"section": "Memory"},
    )
    granule: ByteSize = Field(
        default=ByteSize(16 * KIB), description="Unit of allocation in the pool: 4KiB to 64KiB."
    )
    eviction: str = Field(
        default=POLICIES[0],
        description="Policy that chooses the blocks to evict when the pool is full: "
        f"{' or '.join(POLICIES)}.",
        json_schema_extra={"metavar": "POLICY"},
    )
    eviction_objective: Literal["tokens", "seconds"] = Field(
        default="tokens",
        description="What --eviction density keeps the most of. tokens: tokens that are found "
        "again. seconds: seconds of prefill, where prompts are long and there is no --disk or "
        "--tier; it finds fewer tokens.",
    )
    reserve_limit: ByteSize = Field(
        default=ByteSize(0),
        description="How much of the pool one client may have reserved, lent and fenced at a time, "
        "as 2GiB. All its connections through the Unix socket count together. 0: a quarter of the "
        "pool.",
    )
    reserve_timeout: Seconds = Field(
        default=30.0,
        description="Time without a request after which the reservations of a connection end. "
        "Other clients may then write the same blocks; the reserved slots stay out of use until "
        "the connection closes or commits.",
    )
    prefault: bool = Field(
        default=False,
        description="Touch the whole pool at the start, so that first writes are not slower.",
    )
    huge_pages: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Pages of the pool. on: huge pages that the host has set aside; the node does "
        "not start without them. off: small pages. auto: huge pages if the host has set some "
        "aside, else transparent huge pages, else small pages; the log says why.",
    )
    numa: Literal["auto", "off"] = Field(
        default="auto",
        description="Placement on a host with several NUMA nodes. auto: divide the pool among them "
        "and keep the blocks of an engine near it.",
    )
    digests: Literal["checked", "off"] = Field(
        default="checked",
        description="Digests of blocks. checked: clients compute the CRC32C of each block that "
        "they put, the node checks blocks that it receives over a socket, and readers check what "
        "they read. off: only the disk checks its blocks.",
    )
    disk: str = Field(
        default="",
        description="Folder of the SSD tier, on a local disk. The node keeps blocks there too, "
        "and finds them again after a restart. By default blocks live in memory alone.",
        json_schema_extra={"section": "SSD tier", "metavar": "FOLDER"},
    )
    disk_size: ByteSize = Field(
        default=ByteSize(0),
        description="Size of the SSD tier, as 100GiB; --disk needs it.",
    )
    disk_io: str = Field(
        default="auto",
        description=f"Interface to the disk: auto, {' or '.join(DISK_IO_KINDS)}. auto takes the "
        "first that works.",
        json_schema_extra={"metavar": "KIND"},
    )
    disk_read_timeout: Seconds = Field(
        default=1.0,
        description="Longest wait of a request for blocks from the disk; then it gets only the "
        "blocks that are in memory.",
    )
    tier: Annotated[list[SecretStr], BeforeValidator(_urls)] = Field(
        default_factory=list,
        description="Store below this node that is asked for blocks which the node lacks, and gets "
        "a copy of new blocks: redis://HOST:PORT, redis+cluster://, mooncake://HOST:PORT or "
        "infinistore://HOST:PORT. Several are asked in their order. Give a URL with a password in "
        "the environment: other users can see flags.",
        json_schema_extra={"section": "Tiers below", "metavar": "URL"},
    )
    tier_timeout: Seconds = Field(
        default=1.0,
        le=1,  # less than STORE_DEADLINE_S, after which a router takes a silent node as away
        description="Longest wait of a request for blocks from --tier: at most 1.",
        json_schema_extra={"metavar": "SECONDS"},
    )
    tier_memory: ByteSize = Field(
        default=ByteSize(64 * MIB),
        description="Memory for blocks on their way to and from --tier; a quarter must hold a "
        "block.",
    )
    kv_events_config: KVEvents = KVEventsConfig()
    rdma: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="One-sided RDMA for clients on other hosts; it pins the pool. on: the node "
        "does not start without a device. auto: if there is a device; otherwise the log says why.",
        json_schema_extra={"section": "RDMA"},
    )
    rdma_connections: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Connections that may have a queue pair at a time; further ones use TCP.",
    )
    token_file: str = Field(
        default="",
        description="File of the tenants' tokens, TENANT:TOKEN on each line; other users must not "
        "be able to read it. With it, clients and HTTP requests need one of the tokens. The node "
        "reads it again on SIGHUP.",
        json_schema_extra={"section": "Tenants and TLS"},
    )
    quota: Quotas = Field(
        default_factory=list,
        description="Share of the pool that is guaranteed to a tenant, as TENANT=SIZE or "
        "TENANT=PERCENT (research=40GiB, batch=25%).",
        json_schema_extra={"metavar": "TENANT=SIZE"},
    )
    insecure: bool = Field(
        default=False,
        description="Serve without tokens on an address that other hosts can reach.",
    )
    tls_cert_file: str = Field(
        default="",
        description="PEM file of the certificate and its chain, for TLS with clients over TCP "
        "(kvs://) and for HTTPS. The node reads it and its key again on SIGHUP.",
    )
    tls_key_file: str = Field(
        default="",
        description="PEM file of the certificate's key, without a passphrase; other users must "
        "not be able to read it.",
    )
    tls_ca_file: str = Field(
        default="",
        description="PEM file of CAs. With it, the node serves over TCP only clients that show a "
        "certificate of one of them.",
    )
    log_level: Literal["error", "warning", "info", "debug"] = Field(
        default="info",
        description="Lowest severity that the node logs.",
        json_schema_extra={"section": "Logs and shutdown"},
    )
    log_format: LogFormat = "auto"
    drain_timeout: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="How long puts, leases and replies in flight may take after SIGTERM.",
    )

    @field_validator("log_level", mode="before")
    @classmethod
    def _level_in_any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("huge_pages", "numa", "rdma", "digests", mode="before")
    @classmethod
    def _bare_words_of_yaml(cls, value: object) -> object:
        """YAML reads a bare on as true and a bare off as false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("disk_io")
    @classmethod
    def _known_io(cls, value: str) -> str:
        if value not in {"auto", *DISK_IO_KINDS}:
            raise ValueError(f"give auto, {' or '.join(DISK_IO_KINDS)}")
        return value

    @field_validator("eviction")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in {*POLICIES, GONE_POLICY}:
            raise ValueError(f"give {' or '.join(POLICIES)}")
        return value

    @model_validator(mode="after")
    def _an_objective_of_the_policy(self) -> Self:
        if self.eviction_objective == "seconds" and self.eviction == "lru":
            raise ValueError("--eviction-objective seconds needs --eviction density")
        return self

    @field_validator("memory", "tier_memory")
    @classmethod
    def _at_least_a_mebibyte(cls, value: ByteSize) -> ByteSize:
        if value < MIB:
            raise ValueError("give at least 1MiB")
        return value

    @model_validator(mode="after")
    def _flags_of_a_tier(self) -> Self:
        for name in () if self.tier else ("tier_memory", "tier_timeout"):
            if getattr(self, name) != type(self).model_fields[name].default:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} needs --tier: give a URL, or leave it out")
        return self

    @field_validator("quota")
    @classmethod
    def _fitting_quotas(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if "memory" in info.data:  # else that is what is wrong
            quota_bytes(value, info.data["memory"])
        return value

    @field_validator("granule")
    @classmethod
    def _a_power_of_two(cls, value: ByteSize) -> ByteSize:
        if not 4 * KIB <= value <= 64 * KIB or value & (value - 1):
            raise ValueError("the granule is 4KiB, 8KiB, 16KiB, 32KiB or 64KiB")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **others: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the arguments of the constructor only: the command line reads the environment."""
        return (init_settings,)

    def unix_path(self) -> Path | None:
        """Path of the Unix socket; None for no socket."""
        if self.unix_socket == "none":
            return None
        if self.unix_socket:
            return Path(self.unix_socket)
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if not os.access(base, os.W_OK):  # also where the variable outlived its folder
            base = f"/tmp/kvstore-{os.getuid()}"
        return Path(base) / f"kvstore-{self.port or f'pid-{os.getpid()}'}.sock"
