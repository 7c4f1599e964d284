"""Settings of `kvrouter demo`."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvrouter.options.settings import Settings
from kvrouter.options.types import Port


class DemoSettings(Settings):
    """Which engines the demo runs, and how much load it sends."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_DEMO_", frozen=True)

    engine: Literal["sim", "vllm", "torch"] = Field(
        default="sim",
        description="Engines of the demo. sim: simulated ones. vllm: real ones; vLLM must be "
        "installed. torch: small ones over transformers, which must be installed.",
        json_schema_extra={"section": "Engines"},
    )
    model: str = Field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        min_length=1,
        description="Model of vLLM and torch engines: the folder, or the name on the Hugging Face "
        "Hub, of a small model; for vLLM with a chat template.",
    )
    vllm_python: str = Field(
        default="",
        description="Python interpreter of the environment where vLLM is installed. By default "
        "the one that runs the demo.",
        json_schema_extra={"metavar": "FILE"},
    )
    torch_python: str = Field(
        default="",
        description="Python interpreter of the environment where torch, transformers and "
        "kvrouter-store are installed. By default the one that runs the demo.",
        json_schema_extra={"metavar": "FILE"},
    )
    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest time until vLLM or torch engines are ready, the model's download "
        "included.",
    )
    keep: bool = Field(
        default=False,
        description="Keep everything running after the figures, until Ctrl-C.",
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


def engine_environment(processors: str, sockets: Path) -> dict[str, str]:
    """The environment of a vLLM engine: loopback alone, and processors of its own.

    Args:
        processors: as vLLM's CPU backend takes them.
        sockets: folder for the sockets between the engine's own processes.
    """
    own = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": processors}
    return {**own, **child_environment(), "VLLM_RPC_BASE_PATH": str(sockets)}
