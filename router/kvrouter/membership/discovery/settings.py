"""Settings of service discovery: where engines come from, beside flags and the admin API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from kvrouter.membership.discovery import SOURCES, make_source


def _split(value: Any) -> Any:
    """Split a list of the environment (`a,b` or `a b`); a flag may be a path with blanks."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


class DiscoverySettings(BaseModel):
    """Sources of engines."""

    discovery: Annotated[list[str], BeforeValidator(_split)] = Field(
        default_factory=list,
        description="More sources of engines. "
        + " ".join(kind.summary for kind in SOURCES.values()),
        json_schema_extra={
            "section": "Engines",
            "flags": ["--discovery-file"],
            "metavar": "SOURCE",
        },
    )

    @field_validator("discovery")
    @classmethod
    def _sources(cls, value: list[str]) -> list[str]:
        wanted = list(dict.fromkeys(value))
        names = [make_source(text).name for text in wanted]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"discovery {twice[0]} is given twice; leave one out")
        return wanted
