"""The base class of the settings of a command."""

from __future__ import annotations

from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one command; `env_prefix` in its configuration begins its variables.

    A model that is made directly has its arguments and defaults only. `load.load` reads flags,
    the environment and the YAML file.
    """

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, enable_decoding=False, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **others: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the arguments of the constructor, and nothing else."""
        return (init_settings,)
