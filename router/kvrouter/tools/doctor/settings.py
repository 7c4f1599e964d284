"""Settings of `kvrouter doctor`: the router's own, so that its flags and file can be given."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from kvrouter.app.settings import RouterSettings


class DoctorSettings(RouterSettings):
    """The router whose set-up is examined, and how.

    It needs no engine: whatever is named is examined.
    """

    json_output: bool = Field(
        default=False,
        description="Print JSON instead of text: an object with `findings`, a list.",
        json_schema_extra={"flags": ["--json"]},
    )
    strict: bool = Field(
        default=False, description="End with exit code 1 for warnings too, not for errors alone."
    )
    doctor_deadline_s: float = Field(
        default=20.0,
        gt=0,
        le=600,
        description="Seconds that an engine may take for one request of the doctor's, such as a "
        "prompt of a few blocks.",
        json_schema_extra={"flags": ["--doctor-deadline"]},
    )
    host_root: Path = Field(
        default=Path("/"),
        description="Folder under which /proc, /sys and /dev of the host are: where the host's "
        "root is mounted in a container.",
    )

    @model_validator(mode="after")
    def _some_engine(self) -> DoctorSettings:
        """Takes the router's place, which needs a decode engine."""
        return self
