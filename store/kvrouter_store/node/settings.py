"""Settings of a store node: flags > environment (KVROUTER_STORE_*) > YAML file > these defaults.

And the types of the settings that all clients of a node have: their token, their files for TLS.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvrouter_store._core import DISK_IO_KINDS, EVICTION_POLICIES
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.node.quotas import quota_bytes, split_quotas
from kvrouter_store.rdma.options import LINK_TYPES, NO_HINT, RdmaOptions

__all__ = [
    "GONE_POLICY",
    "KIB",
    "FileMode",
    "RdmaDevName",
    "RdmaGidIndex",
    "RdmaIbPort",
    "RdmaLinkType",
    "StoreCaFile",
    "StoreCertFile",
    "StoreKeyFile",
    "StoreSettings",
    "StoreToken",
]

KIB = 1024
MIB = 1024 * KIB
MIN_POOL_BYTES = MIB
GONE_POLICY = "s3fifo"  # still taken for --eviction, and means the default
MODE = re.compile(r"0?[67][0-7][0-7]")


def _secret(value: Any) -> SecretStr:
    given = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    return SecretStr(check_token(given))


class FileMode(int):
    """Permissions of a file, written as four octal digits."""

    def __str__(self) -> str:
        return f"{int(self):04o}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """Take text, or what is a FileMode already; show text."""
        shown = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(cls.read, serialization=shown)

    @classmethod
    def read(cls, value: object) -> "FileMode":
        """The mode that is written. ValueError where it is none that lets the owner in.

        A bare number is refused: YAML reads 0660 as 432, and nobody means that.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and MODE.fullmatch(value):
            return cls(value, 8)
        raise ValueError("write four octal digits in quotes that let the owner in, as '0660'")


StoreToken = Annotated[SecretStr, BeforeValidator(_secret)]
Quotas = Annotated[list[str], NoDecode, BeforeValidator(split_quotas)]
StoreCaFile = Annotated[
    str,
    Field(
        description="PEM file of the CA that signed the certificate of a store at kvs://; "
        "without it, whom this machine trusts"
    ),
]
StoreCertFile = Annotated[
    str, Field(description="PEM file of the certificate for a store that asks clients for one")
]
RDMA = RdmaOptions()
RdmaDevName = Annotated[
    str,
    Field(
        description="RDMA device, as ibv_devices lists it; several, with or without the index of a "
        "GID each (mlx5_1:6,mlx5_2:7), take turns by rank; empty: the first that can be used"
    ),
]
RdmaIbPort = Annotated[int, Field(ge=1, le=255, description="port of the RDMA device")]
RdmaLinkType = Annotated[
    str,
    Field(
        pattern=f"^({'|'.join(LINK_TYPES)})?$",
        description=f"what that port must be: {' or '.join(LINK_TYPES)}; empty: whatever it is",
    ),
]
RdmaGidIndex = Annotated[
    int,
    Field(
        ge=NO_HINT,
        le=255,
        description=f"index of the GID to use on RDMA devices without one of their own; {NO_HINT}: "
        "one is looked up",
    ),
]
StoreKeyFile = Annotated[str, Field(description="PEM file of that certificate's key")]


class StoreSettings(BaseSettings):
    """One store node: where it listens and how much memory it holds."""

    model_config = SettingsConfigDict(
        env_prefix="KVROUTER_STORE_", extra="forbid", frozen=True, validate_default=True
    )

    host: str = Field(
        default="127.0.0.1", description="address to listen on, for clients and for HTTP"
    )
    port: int = Field(
        default=7400,
        ge=0,
        le=65535,
        description="port for clients; 0 takes a free one",
        json_schema_extra={"flags": ["--service-port"]},
    )
    http_port: int = Field(
        default=7480,
        ge=0,
        le=65535,
        description="port of /healthz, /metrics, /stats, /purge; 0 takes a free one",
        json_schema_extra={"flags": ["--manage-port"]},
    )
    memory: ByteSize = Field(
        default=ByteSize(512 * MIB), description="size of the pool of KV blocks, as 8GiB or 512MiB"
    )
    unix_socket: str = Field(
        default="",
        description="path of the Unix socket through which clients of this host map the pool; "
        "empty: one is made in the run-time directory, 'none': no Unix socket",
    )
    unix_socket_mode: FileMode = Field(
        default=FileMode(0o600),
        description="who may use the Unix socket, as octal digits: 0600 this user, 0660 its group "
        "too; whoever may, maps the pool",
    )
    token_file: str = Field(
        default="",
        description="file of the tenants' tokens, TENANT:TOKEN on each line; clients and HTTP must "
        "then show one of them; read again on SIGHUP. Others must not be able to read it",
    )
    quota: Quotas = Field(
        default_factory=list,
        description="what a tenant can count on of the pool, as TENANT=SIZE or TENANT=PERCENT "
        "(research=40GiB, batch=25%); repeat it or give a list",
    )
    tls_cert_file: str = Field(
        default="",
        description="PEM file of the certificate, and what leads to its CA, for TLS with clients "
        "over TCP (kvs://) and HTTPS; read again on SIGHUP, as is its key",
    )
    tls_key_file: str = Field(
        default="",
        description="PEM file of the certificate's key, without a passphrase. Others must not be "
        "able to read it",
    )
    tls_ca_file: str = Field(
        default="",
        description="PEM file of the CAs of clients: over TCP only who shows a certificate of one "
        "of them is served",
    )
    insecure: bool = Field(
        default=False,
        description="serve without tokens on an address that other hosts reach",
    )
    granule: ByteSize = Field(
        default=ByteSize(16 * KIB), description="unit of allocation in the pool: 4KiB to 64KiB"
    )
    prefault: bool = Field(
        default=False,
        description="touch the whole pool at the start, so that no first write pays for it",
    )
    huge_pages: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="pages of the pool: auto takes huge ones that the host has set aside, else "
        "transparent ones, else small ones, and logs why; on: those set aside or no start; "
        "off: small ones",
    )
    numa: Literal["auto", "off"] = Field(
        default="auto",
        description="auto divides the pool among the NUMA nodes of the host, where it has several, "
        "and keeps what an engine writes near it",
    )
    reserve_limit: ByteSize = Field(
        default=ByteSize(0),
        description="how much of the pool one client may have reserved, lent and fenced at a time, "
        "as 2GiB; its connections through the Unix socket count together; 0: a quarter of the pool",
    )
    reserve_timeout: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds without a request after which a connection's reservations end: others "
        "may write the same blocks, and its slots stay out of use until it is gone or commits",
    )
    digests: Literal["checked", "off"] = Field(
        default="checked",
        description="checked: clients compute the CRC32C of each block that they put, the node "
        "checks what comes over a socket, readers check what they read; off: nobody does, but for "
        "what lies on the disk",
    )
    eviction: str = Field(
        default=EVICTION_POLICIES[0],
        description=f"who goes when the pool is full: {', '.join(EVICTION_POLICIES)}",
    )
    disk: str = Field(
        default="",
        description="folder of the SSD tier, on a disk of this host: blocks are kept there too, "
        "and found again after a restart; empty: blocks live in memory alone",
    )
    disk_size: ByteSize = Field(
        default=ByteSize(0),
        description="how much the SSD tier may have, as 100GiB; --disk needs it",
    )
    disk_io: str = Field(
        default="auto",
        description=f"how the disk is read and written: {', '.join(DISK_IO_KINDS)}; auto takes the "
        "first that works",
    )
    disk_read_timeout: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a request waits for blocks from the disk; then it gets those "
        "that are in memory",
    )
    rdma: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="one-sided RDMA for clients on other hosts: auto where there is a device, "
        "saying in the log why not; on: or no start; off. The pool is pinned",
    )
    rdma_connections: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="connections that may have a queue pair at a time; further ones use TCP",
    )
    dev_name: RdmaDevName = RDMA.dev_name
    ib_port: RdmaIbPort = RDMA.ib_port
    link_type: RdmaLinkType = RDMA.link_type
    hint_gid_index: RdmaGidIndex = RDMA.hint_gid_index
    drain_timeout: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that SIGTERM leaves to what is under way: puts, leases, replies",
    )
    log_level: Literal["error", "warning", "info", "debug"] = Field(
        default="info", description="how much is logged"
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
    def _a_way_that_there_is(cls, value: str) -> str:
        if value not in {"auto", *DISK_IO_KINDS}:
            raise ValueError(f"the disk's I/O is auto or one of {', '.join(DISK_IO_KINDS)}")
        return value

    @field_validator("eviction")
    @classmethod
    def _a_policy_that_there_is(cls, value: str) -> str:
        if value not in {*EVICTION_POLICIES, GONE_POLICY}:
            raise ValueError(f"the eviction policy is one of {', '.join(EVICTION_POLICIES)}")
        return value

    @field_validator("memory")
    @classmethod
    def _a_pool_of_some_size(cls, value: ByteSize) -> ByteSize:
        if value < MIN_POOL_BYTES:
            raise ValueError("the pool needs at least 1MiB, as in --memory 512MiB")
        return value

    @field_validator("quota")
    @classmethod
    def _quotas_that_fit(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if "memory" in info.data:  # else that is what is wrong
            quota_bytes(value, info.data["memory"])
        return value

    @model_validator(mode="after")
    def _devices_that_can_be_meant(self) -> "StoreSettings":
        _ = self.rdma_options
        return self

    @property
    def rdma_options(self) -> RdmaOptions:
        """Which RDMA devices to use. ValueError where that cannot be meant."""
        return RdmaOptions(self.dev_name, self.ib_port, self.link_type, self.hint_gid_index)

    @field_validator("granule")
    @classmethod
    def _a_power_of_two(cls, value: ByteSize) -> ByteSize:
        if not 4 * KIB <= value <= 64 * KIB or value & (value - 1):
            raise ValueError("the granule is 4KiB, 8KiB, 16KiB, 32KiB or 64KiB")
        return value

    def unix_path(self) -> Path | None:
        """Where the Unix socket is to be; None where there shall be none."""
        if self.unix_socket == "none":
            return None
        if self.unix_socket:
            return Path(self.unix_socket)
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if not os.access(base, os.W_OK):  # also where the variable outlived its folder
            base = f"/tmp/kvstore-{os.getuid()}"
        return Path(base) / f"kvstore-{self.port or f'pid-{os.getpid()}'}.sock"
