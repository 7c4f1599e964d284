"""Settings of KV events: where they come from, and how many blocks the index remembers."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from kvrouter.options.types import EnginePorts, by_engine


class KvEventSettings(BaseModel):
    """Which publishers of KV events the router listens to."""

    kv_events_bind: str | None = Field(
        default=None,
        description="Address on which the router receives KV events, as tcp://HOST:PORT. The "
        "engines' publishers connect to it with the topic kv@HOST:PORT, where HOST:PORT is the "
        "engine as --prefill and --decode name it.",
        json_schema_extra={"section": "KV events", "metavar": "URL"},
    )
    kv_events_connect: EnginePorts = Field(
        default_factory=list,
        description="Port of the engines' publishers, if these listen (vLLM's default: "
        "tcp://*:5557): PORT for all engines or HOST:PORT=PORT for one. Several routers may "
        "connect.",
    )
    kv_events_replay: EnginePorts = Field(
        default_factory=list,
        description="Port at which an engine's publisher repeats messages (vLLM's "
        "replay_endpoint): PORT for all engines or HOST:PORT=PORT for one. The router asks there "
        "for messages that were lost or sent before it started.",
    )
    kv_events_auto: bool = Field(
        default=True,
        description="Ask each engine where it publishes KV events (vLLM since 0.33), and connect "
        "there. Not asked are engines with a --kv-events-connect, and none is with "
        "--kv-events-bind.",
    )
    store_events_connect: EnginePorts = Field(
        default_factory=list,
        description="Port at which nodes of the store publish what they hold (--kv-events-config "
        "of `kvrouter store`): PORT for all nodes or HOST:PORT=PORT for one. Of several nodes the "
        "router then asks one for each prompt, not all.",
    )
    store_events_replay: EnginePorts = Field(
        default_factory=list,
        description="Port at which nodes repeat these messages (their replay_endpoint): PORT for "
        "all nodes or HOST:PORT=PORT for one. --store-events-connect needs it.",
    )
    index_blocks: int = Field(
        default=1_000_000,
        ge=1024,
        description="Blocks that the index of the engines' caches remembers, and as many those of "
        "their host memory, their storage and the store's nodes, at 49 bytes each. Beyond "
        "it the router forgets the least recently used.",
    )

    @field_validator("kv_events_bind")
    @classmethod
    def _events_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme == "ipc" or (
            parts.scheme == "tcp" and parts.hostname and ":" in parts.netloc
        ):
            return value
        raise ValueError(f"kv_events_bind {value!r}: give it as tcp://HOST:PORT or ipc:///PATH")

    @property
    def takes_kv_events(self) -> bool:
        """Whether the router receives KV events at all."""
        connects = bool(self.kv_events_connect) or self.kv_events_auto
        return connects or self.kv_events_bind is not None

    def asks_events(self, address: str) -> bool:
        """Whether the engine of that address is asked where it publishes them."""
        named = by_engine(self.kv_events_connect)
        return self.kv_events_auto and not (self.kv_events_bind or {"", address} & named.keys())
