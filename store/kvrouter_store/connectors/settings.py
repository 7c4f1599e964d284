"""How a connector or a tier reaches the store: its settings in an engine's flags."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import GONE_DIGEST_SETTINGS, StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.tls import ClientTls, native_context
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.connectors.neighbours import Sources, name_of
from kvrouter_store.errors import KVStoreError
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator
from kvrouter_store.rdma.options import RdmaOptions

log = logging.getLogger("vllm.kvstore")
SaveScope = Literal["none", "prompt", "all"]
RDMA = RdmaOptions()
TOKEN_VARIABLE = "KVROUTER_STORE_TOKEN"  # the variable's name
URL_MISSING = '"url" is missing; set it to the store, such as "kv://127.0.0.1:7400"'
DEPRECATED = {"check_puts", "digest_puts"}
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a positive number of seconds",
    str: "a string",
}


class ConnectorRefused(KVStoreError, ValueError):
    """The engine cannot start with this connector as configured; the message says what to set."""


@dataclass(frozen=True)
class LinkSettings:
    """What any engine may be told of the store that it uses.

    PLACE: the flag that these settings are written in, for refusals.
    url: the store, kv://HOST:PORT, or kvs://HOST:PORT for TLS (required).
    transport: 'auto', 'shm', 'unix', 'tcp' or 'rdma'.
    dev_name, ib_port, link_type, hint_gid_index: of RDMA, as `RdmaOptions` says;
        of several devices each serves consecutive GPUs.
    verify: check the digest of every loaded block.
    deadline_s: seconds within which each operation on the store ends.
    name: what the store lists this engine as. Left out: host and process id.
    token: of the store, where it asks for one. Left out: KVROUTER_STORE_TOKEN of the environment.
    ca_file, cert_file, key_file: for kvs://, as `ClientTls` says. Left out: what
        KVROUTER_STORE_CA_FILE, _CERT_FILE and _KEY_FILE of the environment say.
    model, weights_revision: what is served, where the files do not say it (see `weights`).
    """

    PLACE: ClassVar[str] = "kv_connector_extra_config in --kv-transfer-config"

    url: str
    transport: TransportName = "auto"
    dev_name: str = RDMA.dev_name
    ib_port: int = RDMA.ib_port
    link_type: str = RDMA.link_type
    hint_gid_index: int = RDMA.hint_gid_index
    verify: bool = True
    deadline_s: float = 2.0
    name: str = ""
    token: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    model: str = ""
    weights_revision: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """The settings in `extra`. Raises ConnectorRefused on an unknown key or a bad value."""
        known = {each.name: each.default for each in fields(cls)}
        try:
            for key in extra:
                if key not in known:
                    raise ValueError(f"{key!r} is not a setting; use {', '.join(sorted(known))}")
            if not extra.get("url"):
                raise ValueError(URL_MISSING)
            for key, value in extra.items():
                _check_type(key, value, known[key])
            settings = cls(**{**extra, "token": _token(extra.get("token", ""))})
            settings.check()
        except ValueError as error:
            raise cls.refused(str(error)) from None
        return settings

    @classmethod
    def refused(cls, text: str) -> ConnectorRefused:
        """A setting that cannot be used."""
        return ConnectorRefused(f"{cls.PLACE}: {text}")

    def check(self) -> None:
        """Raise ValueError where a value cannot be meant."""
        one_of("transport", self.transport, get_args(TransportName))
        if self.deadline_s <= 0:
            raise ValueError('"deadline_s" must be a positive number of seconds')
        native_context(parse_url(self.url), self.tls)
        _ = self.rdma_options

    def client(self, name: str, gpu: int = 0, gpus: int = 1) -> StoreClient:
        """A client of the store, listed there under this name, for one of so many GPUs.

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
                rdma=Initiator(self.rdma_options, self.rdma_options.rail_of(gpu, gpus)),
            )
        except RdmaUnavailable as problem:
            raise self.refused(f'"transport" is "rdma": {problem}') from problem

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
        """The files for a store at kvs://."""
        own = ClientTls(self.ca_file, self.cert_file, self.key_file)
        if not parse_url(self.url).tls:
            return own
        return ClientTls(
            own.ca_file or os.environ.get("KVROUTER_STORE_CA_FILE", ""),
            own.cert_file or os.environ.get("KVROUTER_STORE_CERT_FILE", ""),
            own.key_file or os.environ.get("KVROUTER_STORE_KEY_FILE", ""),
        )


@dataclass(frozen=True)
class ConnectorSettings(LinkSettings):
    """What `kv_connector_extra_config` may hold for the connector, and the entry of a tier.

    save: which computed blocks go to the store: 'none', 'prompt', or 'all' (generated ones too).
        Left out: 'all', for kv_role kv_consumer 'none'.
    neighbours: other nodes of the store that are read where a request names them: HOST:PORT or URLs
        with commas between, or 'any'. Left out: none.
    advertise: the URL of the store for others, where it is not `url`.
    update_group: engines that start together, and whose weights change in place together, give the
        same; one that starts later gives another. Left out: it shares with no other after a change.
    """

    save: SaveScope = "all"
    neighbours: str = ""
    advertise: str = ""
    update_group: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], kv_role: str) -> Self:
        """The settings in `extra`. Raises ConnectorRefused on an unknown key or a bad value."""
        scope = "none" if kv_role == "kv_consumer" else "all"
        return cls.of({"save": scope, **_without_deprecated(extra)})

    def check(self) -> None:
        """Raise ValueError where a value cannot be meant."""
        super().check()
        one_of("save", self.save, get_args(SaveScope))
        for each in self.sources.others or ():
            native_context(each, self.at(str(each)).tls)

    @property
    def sources(self) -> Sources:
        """Which nodes a request may name. ValueError where that cannot be meant."""
        return Sources.of(self.neighbours, self.url, self.advertise)

    @property
    def node(self) -> str:
        """The URL of the engine's own node for others; '' where there is none."""
        return name_of(self.url, self.advertise)

    def at(self, node: str) -> Self:
        """How to reach another node, which may be on another host; '' is the own one."""
        if not node:
            return self
        here_only = self.transport in {"shm", "unix"}
        return replace(self, url=node, transport="auto" if here_only else self.transport)


def _without_deprecated(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The other settings. One line in the log reports those that have no effect any more."""
    if extra.keys() & DEPRECATED:
        log.warning("kv_connector_extra_config: %s", GONE_DIGEST_SETTINGS)
    return {key: value for key, value in extra.items() if key not in DEPRECATED}


def one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError where a setting has a value that it may not have."""
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f'"{key}" is {value!r}; use one of {choices}')


def _token(given: str) -> str:
    try:
        # A Secret of Kubernetes keeps the newline of the file that it was made of.
        return check_token((given or os.environ.get(TOKEN_VARIABLE, "")).rstrip("\r\n"))
    except ValueError as error:
        source = '"token"' if given else TOKEN_VARIABLE
        raise ValueError(f"{source} cannot be used: {error}") from None


def _check_type(key: str, value: object, default: object) -> None:
    """Refuse a value of another type than the setting's default, which none has for a text."""
    wanted = type(default) if isinstance(default, bool | int | float) else str
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return
    if type(value) is not wanted:
        raise ValueError(f'"{key}" must be {TYPES[wanted]}')
