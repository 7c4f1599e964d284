"""The flags of the engine."""

import os
import platform
from argparse import ArgumentParser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

_CHOICES = {
    "role": ("prefill", "decode", "both"),
    "cache": ("contiguous", "paged"),
    "dtype": ("float32", "bfloat16", "float16"),
}


@dataclass(frozen=True)
class EngineSettings:
    """How the engine runs; each field is a flag.

    deadline_s: within which each operation on the store ends.
    role: prefill and both put the KV of prompts into the store; every role loads it from there.
    chunk_tokens: tokens computed at once, whole blocks. Only whole chunks are shared, so that a
        prompt is computed in the same steps whether its KV was loaded or not, and its tokens are
        the same bit for bit.
    """

    model: str
    store: str = ""
    deadline_s: float = 2.0
    role: str = "both"
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    cache: str = "contiguous"
    block_tokens: int = 32
    chunk_tokens: int = 128
    max_model_len: int = 4096
    threads: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.chunk_tokens % self.block_tokens or not self.chunk_tokens:
            raise ValueError("--chunk-tokens must be a multiple of --block-tokens")
        if self.max_model_len % self.block_tokens:
            raise ValueError("--max-model-len must be a multiple of --block-tokens")

    @property
    def served(self) -> str:
        """The name that requests use."""
        return self.served_model_name or self.model

    @property
    def engine_name(self) -> str:
        """The name under which the store lists this engine."""
        return self.name or f"torch/{Path(self.model).name}@{platform.node()}:{os.getpid()}"

    @property
    def saves(self) -> bool:
        """Whether computed KV goes to the store."""
        return bool(self.store) and self.role != "decode"

    @property
    def store_token(self) -> str:
        """What the store asks for, from the environment."""
        return os.environ.get("KVROUTER_STORE_TOKEN", "")

    @classmethod
    def from_flags(cls) -> Self:
        """The settings on the command line; ends the program where they cannot be used."""
        parser = ArgumentParser("python -m kvrouter_store.torch_engine")
        for field in fields(cls):
            options: dict[str, Any] = {"required": True}
            if field.name != "model":
                options = {"type": field.type, "default": field.default}
            options["choices"] = _CHOICES.get(field.name)
            parser.add_argument("--" + field.name.replace("_", "-"), **options)
        try:
            return cls(**vars(parser.parse_args()))
        except ValueError as error:
            parser.error(str(error))
