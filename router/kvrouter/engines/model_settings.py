"""Settings of models: other names for them, and limits of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from kvrouter.engines.aliases import Aliases, alias_texts, read_aliases
from kvrouter.options.types import ModelCounts, ModelTokens, by_model, checked

_Given = list[str] | dict[str, str | dict[str, float]]
AliasTexts = Annotated[
    list[str],
    BeforeValidator(alias_texts, json_schema_input_type=_Given),
    checked(read_aliases),
]


class ModelSettings(BaseModel):
    """What clients call the models, and what holds for some of them alone."""

    model_alias: AliasTexts = Field(
        default_factory=list,
        description="Other names for models: NAME=MODEL, or NAME=MODEL:WEIGHT,MODEL:WEIGHT for "
        "several versions that share its sessions, as chat=llama-a:90,llama-b:10. All requests of "
        "a session get one version (--session-key). In YAML also a mapping, of aliases to models "
        "or to mappings of models to weights.",
        json_schema_extra={"section": "Models", "metavar": "NAME=MODEL"},
    )
    model_max_concurrent_requests: ModelCounts = Field(
        default_factory=list,
        description="Requests in flight at a time for a model or an alias, besides "
        "--max-concurrent-requests. Further requests wait in a queue of their own, as long as "
        "--queue-size, and keep no other model waiting. Requests for an alias count for its model "
        "too.",
    )
    model_prefill_threshold: ModelTokens = Field(
        default_factory=list,
        description="--prefill-threshold of an alias or a model, in this order.",
    )

    @property
    def model_limits(self) -> dict[str, int]:
        """`model_max_concurrent_requests` by name."""
        return by_model(self.model_max_concurrent_requests)

    @property
    def model_thresholds(self) -> dict[str, int]:
        """`model_prefill_threshold` by name."""
        return by_model(self.model_prefill_threshold)

    @property
    def aliases(self) -> Aliases:
        """`model_alias`, read."""
        return read_aliases(self.model_alias)
