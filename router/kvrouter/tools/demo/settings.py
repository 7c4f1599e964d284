"""Settings of `kvrouter demo`."""

import os
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvrouter.options.settings import Settings
from kvrouter.options.types import Port


class DemoSettings(Settings):
    """What the demo does at its end, and how much load it sends."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_DEMO_", frozen=True)

    removed: ClassVar = dict.fromkeys(
        (
            *("--engine", "--model", "--vllm-python", "--torch-python"),
            *("--start-timeout", "--start-timeout-s"),
        ),
        "leave it out, as engines are simulated: docs/quickstart-vllm.md starts vLLM engines, "
        "docs/torch.md the torch engine",
    )

    keep: bool = Field(
        default=False,
        description="Keep everything running after the figures, until Ctrl-C.",
        json_schema_extra={"section": "Router"},
    )
    port: Port = Field(default=0, description="Port of the router; 0 takes a free one.")
    documents: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Long texts that the conversations share.",
        json_schema_extra={"section": "Load"},
    )
    conversations: int = Field(
        default=16, ge=1, le=1024, description="Conversations, spread over the documents."
    )
    turns: int = Field(default=3, ge=1, le=16, description="Turns of each conversation.")
    concurrency: int = Field(default=8, ge=1, le=256, description="Conversations at a time.")
    answer_tokens: int = Field(default=24, ge=1, le=1024, description="Tokens of each answer.")
    prefill_time_per_token_us: int = Field(
        default=150,
        ge=0,
        le=100_000,
        description="Time that a simulated engine takes to compute a prompt token.",
        json_schema_extra={"metavar": "MICROSECONDS"},
    )


def child_environment() -> dict[str, str]:
    """The environment of the demo's processes: ours, without settings of kvrouter's commands.

    The router stops without a delay: there is no load balancer in front of it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    return {**kept, "KVROUTER_DRAIN_DELAY_S": "0"}
