"""Settings of the demo: flags > environment (KVROUTER_DEMO_*) > YAML file > these defaults."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["DemoSettings", "child_environment", "engine_environment"]


class DemoSettings(BaseSettings):
    """How much the demo does, and whether it stays."""

    model_config = SettingsConfigDict(
        env_prefix="KVROUTER_DEMO_", extra="forbid", frozen=True, validate_default=True
    )

    engine: Literal["sim", "vllm"] = Field(
        default="sim",
        description="engines: sim, simulated ones; vllm, real ones, where vLLM is installed",
    )
    model: str = Field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        min_length=1,
        description="what vLLM engines serve: a folder, or a name on the Hugging Face Hub, of a "
        "small model with a chat template",
    )
    vllm_python: str = Field(
        default="",
        description="python of the environment where vLLM is installed; without it, the one that "
        "runs the demo",
    )
    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds until vLLM engines must be ready, a model's download included",
        json_schema_extra={"flags": ["--start-timeout"]},
    )
    keep: bool = Field(
        default=False, description="leave everything up after the figures, until Ctrl-C"
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="port of the router; 0 takes a free one"
    )
    documents: int = Field(
        default=4, ge=1, le=64, description="long texts that conversations are about"
    )
    conversations: int = Field(
        default=16, ge=1, le=1024, description="conversations, spread over the documents"
    )
    turns: int = Field(default=3, ge=1, le=16, description="turns of each conversation")
    concurrency: int = Field(default=8, ge=1, le=256, description="conversations at a time")
    answer_tokens: int = Field(default=24, ge=1, le=1024, description="tokens of each answer")
    prefill_time_per_token_us: int = Field(
        default=150,
        ge=0,
        le=100_000,
        description="microseconds that computing a prompt token takes a simulated engine",
    )


def child_environment() -> dict[str, str]:
    """The environment for what the demo starts: ours without settings of kvrouter's commands.

    A router ends without a delay: no load balancer stands before it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    return {**kept, "KVROUTER_DRAIN_DELAY_S": "0"}


def engine_environment(processors: str, sockets: Path) -> dict[str, str]:
    """The environment of a vLLM engine: loopback alone, processors that no other one has.

    `sockets`: the folder for those between its own processes.
    """
    own = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": processors}
    return {**own, **child_environment(), "VLLM_RPC_BASE_PATH": str(sockets)}
