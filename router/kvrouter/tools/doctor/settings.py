"""Settings of `kvrouter doctor`: those of the router, whose flags and file it takes, and more."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from kvrouter.app.settings import RouterSettings


class DoctorSettings(RouterSettings):
    """The set-up to check, and how. No engine is required."""

    json_output: bool = Field(
        default=False,
        description="Print JSON instead of text: an object with a list `findings`.",
        json_schema_extra={"section": "The check", "flags": ["--json"]},
    )
    strict: bool = Field(
        default=False, description="Exit with code 1 for warnings too, not only for errors."
    )
    doctor_deadline_s: float = Field(
        default=20.0,
        gt=0,
        le=600,
        description="Longest time for an engine's answer to one request of the doctor, such as a "
        "prompt of a few blocks.",
    )
    host_root: Path = Field(
        default=Path("/"),
        description="Folder that holds /proc, /sys and /dev of the host. In a container, give "
        "the path where the host's root is mounted.",
        json_schema_extra={"metavar": "FOLDER"},
    )

    @model_validator(mode="after")
    def _some_engine(self) -> DoctorSettings:
        """Replace the router's check, which requires an engine."""
        return self
