"""The connector's settings, and what it refuses to start with. Knows vLLM's configuration only.

A setting is a key of `kv_connector_extra_config` in --kv-transfer-config. A refusal at start is one
sentence with the flag to set; a model whose KV cannot be shared is no refusal at start: the engine
runs without sharing (`vllm_identity.sharing_refusal`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import GONE_DIGEST_SETTINGS, StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.tls import ClientTls, native_context
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.connectors.environment import (
    TOKEN_VARIABLE,
    tls_of_environment,
    token_of_environment,
)
from kvrouter_store.connectors.vllm.versions import VERSIONS, facts_of
from kvrouter_store.errors import KVStoreError
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator
from kvrouter_store.rdma.options import RdmaOptions

log = logging.getLogger("vllm.kvstore")
SaveScope = Literal["none", "prompt", "all"]
RDMA = RdmaOptions()
FILES = ("ca_file", "cert_file", "key_file")
TEXTS = ("url", "name", "token", "model", "weights_revision", "dev_name", "link_type", *FILES)
NUMBERS = ("parts", "ib_port", "hint_gid_index")
DEPRECATED = {"check_puts", "digest_puts"}


class ConnectorRefused(KVStoreError, ValueError):
    """The engine cannot start with this connector as configured; the message says what to set."""


@dataclass(frozen=True)
class ConnectorSettings:
    """What `kv_connector_extra_config` may hold.

    url: the store, kv://HOST:PORT, or kvs://HOST:PORT for TLS (required).
    transport: 'auto', 'shm', 'unix', 'tcp' or 'rdma'.
    dev_name, ib_port, link_type, hint_gid_index: of RDMA, as `RdmaOptions` says;
        several devices take turns by tensor-parallel rank.
    verify: check the digest of every loaded block.
    deadline_s: seconds within which each operation on the store ends.
    save: which computed blocks go to the store: 'none', 'prompt', or 'all' (generated ones too).
        Left out: 'all', for kv_role kv_consumer 'none'.
    parts: into how many parts a block is divided by its KV heads; engines with other numbers of
        ranks share where it is the same. Left out (0): one for each rank.
    name: what the store lists this engine as. Left out: host and process id.
    token: of the store, where it asks for one. Left out: KVROUTER_STORE_TOKEN of the environment.
    ca_file, cert_file, key_file: for kvs://, as `ClientTls` says. Left out: what
        KVROUTER_STORE_CA_FILE, _CERT_FILE and _KEY_FILE of the environment say.
    model, weights_revision: what is served, where the files cannot tell (see vllm_identity).
    """

    url: str
    transport: TransportName = "auto"
    dev_name: str = RDMA.dev_name
    ib_port: int = RDMA.ib_port
    link_type: str = RDMA.link_type
    hint_gid_index: int = RDMA.hint_gid_index
    verify: bool = True
    deadline_s: float = 2.0
    save: SaveScope = "all"
    parts: int = 0
    name: str = ""
    token: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    model: str = ""
    weights_revision: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], kv_role: str) -> "ConnectorSettings":
        """The settings in `extra`. Raises ConnectorRefused on an unknown key or a bad value."""
        known = {each.name for each in fields(cls)}
        extra = _without_deprecated(extra)
        for key in extra:
            if key not in known:
                raise _refused(f"{key!r} is not a setting; use {', '.join(sorted(known))}")
        if not extra.get("url"):
            raise _refused('"url" is missing; set it to the store, such as "kv://127.0.0.1:7400"')
        values: dict[str, Any] = {"save": "none" if kv_role == "kv_consumer" else "all", **extra}
        _one_of("save", values["save"], get_args(SaveScope))
        _one_of("transport", values.get("transport", "auto"), get_args(TransportName))
        if not isinstance(values.get("verify", True), bool):
            raise _refused('"verify" must be true or false')
        deadline = values.get("deadline_s", 2.0)
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or deadline <= 0:
            raise _refused('"deadline_s" must be a positive number of seconds')
        _check_types(values)
        values["token"] = _token(values.get("token", ""))
        settings = cls(**values)
        try:
            native_context(parse_url(settings.url), settings.tls)
            _ = settings.rdma_options
        except ValueError as error:
            raise _refused(str(error)) from None
        return settings

    def client(self, name: str, rank: int = 0) -> StoreClient:
        """A client of the store, listed there under this name, with the RDMA device of a rank.

        Raises ConnectorRefused where RDMA is demanded and there is no device.
        """
        try:
            return StoreClient(
                self.url,
                transport=self.transport,
                verify=self.verify,
                deadline_s=self.deadline_s,
                name=name,
                token=self.token,
                tls=self.tls,
                rdma=Initiator(self.rdma_options, rank),
            )
        except RdmaUnavailable as problem:
            raise _refused(f'"transport" is "rdma": {problem}') from problem

    def waiter(self, name: str) -> AsyncStoreClient:
        """A client that waits for landings, for the event loop that is running."""
        return AsyncStoreClient(
            self.url, name=name, token=self.token, tls=self.tls, deadline_s=self.deadline_s
        )

    @property
    def rdma_options(self) -> RdmaOptions:
        """Which RDMA device to use. ValueError where that cannot be meant."""
        return RdmaOptions(self.dev_name, self.ib_port, self.link_type, self.hint_gid_index)

    @property
    def tls(self) -> ClientTls:
        """What the store is shown, and who must have signed what it shows."""
        own = ClientTls(self.ca_file, self.cert_file, self.key_file)
        if not parse_url(self.url).tls:
            return own  # what the environment says for others does not matter here
        inherited = tls_of_environment()
        return ClientTls(
            own.ca_file or inherited.ca_file,
            own.cert_file or inherited.cert_file,
            own.key_file or inherited.key_file,
        )


def check_start(vllm_config: Any, version: str) -> ConnectorSettings:
    """The settings of an engine that may start. Raises ConnectorRefused, with the flag to set."""
    facts = facts_of(version)
    if facts is None:
        tested = ", ".join(row.series for row in VERSIONS)
        raise ConnectorRefused(
            f"KVStoreConnector was not tested with vLLM {version}: install a vLLM of series "
            f"{tested}, or a newer kvrouter"
        )
    transfer = vllm_config.kv_transfer_config
    settings = ConnectorSettings.parse(transfer.kv_connector_extra_config, transfer.kv_role)
    for complaint in _complaints(vllm_config, facts.hash_algo):
        raise ConnectorRefused(f"KVStoreConnector cannot work so: {complaint}")
    return settings


def _complaints(vllm_config: Any, hash_algo: str) -> list[str]:
    """What stands in the way, each with the flag that removes it."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    found = []
    if vllm_config.device_config.device_type != "cpu":
        found.append(
            "it copies KV from host memory, and this engine's lies on "
            f"{vllm_config.device_config.device_type}; start a CPU build of vLLM, or set "
            '"kv_connector":"OffloadingConnector" in --kv-transfer-config on this engine'
        )
    if not cache.enable_prefix_caching:
        found.append("blocks have no names without prefix caching; set --enable-prefix-caching")
    if cache.prefix_caching_hash_algo != hash_algo:
        found.append(
            f"block hashes are {cache.prefix_caching_hash_algo!r}, which nobody else computes; "
            f"set --prefix-caching-hash-algo {hash_algo}"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        found.append(
            "a block lost from the store would fail its request; set "
            '"kv_load_failure_policy":"recompute" in --kv-transfer-config'
        )
    if parallel.pipeline_parallel_size != 1:
        found.append("a rank must hold all layers; set --pipeline-parallel-size 1")
    if parallel.decode_context_parallel_size != 1:
        found.append("a rank must hold all tokens; set --decode-context-parallel-size 1")
    return found


def _without_deprecated(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The other settings. One line in the log reports those that have no effect any more."""
    if extra.keys() & DEPRECATED:
        log.warning("kv_connector_extra_config: %s", GONE_DIGEST_SETTINGS)
    return {key: value for key, value in extra.items() if key not in DEPRECATED}


def _refused(text: str) -> ConnectorRefused:
    return ConnectorRefused(f"kv_connector_extra_config in --kv-transfer-config: {text}")


def _token(given: str) -> str:
    try:
        return check_token(given or token_of_environment())
    except ValueError as error:
        source = '"token"' if given else TOKEN_VARIABLE
        raise _refused(f"{source} cannot be used: {error}") from None


def _check_types(values: Mapping[str, Any]) -> None:
    for key in TEXTS:
        if not isinstance(values.get(key, ""), str):
            raise _refused(f'"{key}" must be a string')
    for key in NUMBERS:
        number = values.get(key, 0)
        if isinstance(number, bool) or not isinstance(number, int):
            raise _refused(f'"{key}" must be a whole number')
    if values.get("parts", 0) < 0:
        raise _refused('"parts" must be a number of parts, such as 2')


def _one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise _refused(f'"{key}" is {value!r}; use one of {choices}')
