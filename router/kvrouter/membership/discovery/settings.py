"""Settings of where engines come from, beside flags and the admin API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from kvrouter.membership.discovery import make_source


def _split(value: Any) -> Any:
    """In the environment a list is written `a,b` or `a b`; a flag may hold blanks, as paths do."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


class DiscoverySettings(BaseModel):
    """Sources of engines."""

    discovery: Annotated[list[str], NoDecode, BeforeValidator(_split)] = Field(
        default_factory=list,
        description="Where engines come from besides --prefill and --decode; repeat it or give a "
        "list: FILE, a YAML file with lists `prefill` and `decode` that is watched; "
        "dns://NAME:PORT?role=decode, the addresses of a name; srv://NAME?role=decode, the SRV "
        "records of a service; redis, the engines that `kvrouter register` keeps in the Redis of "
        "--redis.",
        json_schema_extra={"flags": ["--discovery-file"]},
    )

    @field_validator("discovery")
    @classmethod
    def _sources(cls, value: list[str]) -> list[str]:
        wanted = list(dict.fromkeys(value))
        names = [make_source(text).name for text in wanted]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"discovery {twice[0]} is given twice: leave one")
        return wanted
