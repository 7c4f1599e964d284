"""Settings of models: other names for them, and limits of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from kvrouter.engines.aliases import Aliases, alias_texts, read_aliases

AliasTexts = Annotated[list[str], BeforeValidator(alias_texts)]


class ModelSettings(BaseModel):
    """What clients call the models."""

    model_alias: AliasTexts = Field(
        default_factory=list,
        description="Other names for models: NAME=MODEL, or NAME=MODEL:WEIGHT,MODEL:WEIGHT for "
        "several versions that share its sessions, as chat=llama-a:90,llama-b:10. All requests of "
        "a session get one version (--session-key). In YAML also a mapping, of aliases to models "
        "or to mappings of models to weights.",
        json_schema_extra={"section": "Models", "metavar": "NAME=MODEL"},
    )

    @field_validator("model_alias")
    @classmethod
    def _clear_aliases(cls, value: list[str]) -> list[str]:
        read_aliases(value)
        return value

    @property
    def aliases(self) -> Aliases:
        """`model_alias`, read."""
        return read_aliases(self.model_alias)
