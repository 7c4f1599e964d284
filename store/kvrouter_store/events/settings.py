"""The setting of a publisher of KV events, in vLLM's form."""

from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class KVEventsConfig(BaseModel):
    """vLLM's `--kv-events-config`, as far as it is known here. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = Field(default=10_000, ge=1)
    topic: str | None = None

    def address(self) -> str | None:
        """Where events go; None if they are not enabled."""
        return self.endpoint if self.enable_kv_cache_events else None


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise ValueError("give a JSON object, as '{\"enable_kv_cache_events\": true}'") from None


KVEvents = Annotated[
    KVEventsConfig,
    BeforeValidator(_parsed),
    Field(
        description="vLLM's JSON: enable_kv_cache_events, endpoint, replay_endpoint, "
        "buffer_steps, topic.",
        json_schema_extra={"section": "KV events", "metavar": "JSON"},
    ),
]
