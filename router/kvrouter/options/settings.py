"""The base class of the settings of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

if TYPE_CHECKING:
    from collections.abc import Mapping


class Settings(BaseSettings):
    """Settings of one command; `env_prefix` in its configuration begins its variables.

    A model that is made directly has its arguments and defaults only. `load.load` reads flags,
    the environment and the YAML file.

    Attributes:
        removed: what to do in place of flags that earlier versions had, by the flag.
    """

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, enable_decoding=False, protected_namespaces=()
    )
    removed: ClassVar[Mapping[str, str]] = {}

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
