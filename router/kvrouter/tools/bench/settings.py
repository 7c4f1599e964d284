"""Settings of `kvrouter bench serve`; flags have the names that `vllm bench serve` gives them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Name = Literal["ttft", "tpot", "itl", "e2el"]


class BenchSettings(BaseSettings):
    """What is sent where, and what is told of it."""

    model_config = SettingsConfigDict(
        env_prefix="KVROUTER_BENCH_", extra="forbid", frozen=True, validate_default=True
    )

    base_url: str = Field(
        default="http://127.0.0.1:8000", description="router or engine, without a path"
    )
    endpoint: Literal["/v1/completions"] = Field(
        default="/v1/completions", description="where requests go; prompts are token ids"
    )
    model: str | None = Field(
        default=None, description="model to ask for; default: the first that /v1/models names"
    )
    api_key: SecretStr = Field(
        default=SecretStr(""),
        description="key to bring, as Authorization: Bearer; better given in the environment",
    )
    num_prompts: int = Field(default=1000, ge=1, le=10_000_000, description="requests in all")
    random_input_len: int = Field(
        default=1024, ge=1, le=10_000_000, description="tokens of a prompt, without its prefix"
    )
    random_prefix_len: int = Field(
        default=0, ge=0, le=10_000_000, description="tokens that all prompts begin with"
    )
    random_output_len: int = Field(
        default=128, ge=1, le=1_000_000, description="tokens of an answer"
    )
    random_token_ids: Annotated[tuple[int, int], NoDecode] = Field(
        default=(1000, 2000),
        description="FIRST,END of the token ids that prompts are drawn from, within the vocabulary",
    )
    request_rate: float = Field(
        default=float("inf"),
        gt=0,
        description="requests a second, at random times (Poisson); inf sends all at once",
    )
    max_concurrency: int | None = Field(
        default=None, ge=1, le=1_000_000, description="requests under way at most"
    )
    seed: int = Field(default=0, ge=0, description="of prompts and of the times they are sent")
    ignore_eos: bool = Field(default=False, description="let answers have their full length")
    temperature: float | None = Field(
        default=None, ge=0, description="sampling temperature; default: the server's own"
    )
    request_timeout: float = Field(
        default=600.0, gt=0, description="seconds that a request may take"
    )
    percentile_metrics: Annotated[tuple[Name, ...], NoDecode] = Field(
        default=("ttft", "tpot", "itl"),
        description="which times are told, of ttft,tpot,itl,e2el",
    )
    metric_percentiles: Annotated[tuple[float, ...], NoDecode] = Field(
        default=(99.0,), description="which percentiles of them"
    )
    save_result: Path | None = Field(
        default=None, description="file for the figures as JSON, under the names vLLM gives them"
    )

    @field_validator("random_token_ids", "percentile_metrics", "metric_percentiles", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _whole_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("give it as http://HOST:PORT")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _drawable(self) -> Self:
        first, end = self.random_token_ids
        if not 0 <= first < end:
            raise ValueError("--random-token-ids: give FIRST,END with FIRST below END")
        if not all(0 < p <= 100 for p in self.metric_percentiles):
            raise ValueError("--metric-percentiles: a percentile is above 0 and at most 100")
        return self
