"""Settings of `kvrouter bench serve`; flags have the names that `vllm bench serve` gives them."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from kvrouter.options.settings import Settings

Name = Literal["ttft", "tpot", "itl", "e2el"]


class BenchSettings(Settings):
    """What to send, where, and what to report."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_BENCH_", frozen=True)

    base_url: str = Field(
        default="http://127.0.0.1:8000",
        description="URL of a router or an engine, without a path.",
        json_schema_extra={"section": "Server"},
    )
    endpoint: Literal["/v1/completions"] = Field(
        default="/v1/completions", description="Path of the requests; prompts are token ids."
    )
    model: str | None = Field(
        default=None, description="Model to ask for. By default the first of /v1/models."
    )
    api_key: SecretStr = Field(
        default=SecretStr(""),
        description="API key, sent as Authorization: Bearer. Give it in the environment: other "
        "users can see flags.",
    )
    num_prompts: int = Field(
        default=1000,
        ge=1,
        le=10_000_000,
        description="Requests in all.",
        json_schema_extra={"section": "Load"},
    )
    random_input_len: int = Field(
        default=1024, ge=1, le=10_000_000, description="Tokens of a prompt after the prefix."
    )
    random_prefix_len: int = Field(
        default=0, ge=0, le=10_000_000, description="Tokens of the prefix that prompts share."
    )
    random_output_len: int = Field(
        default=128, ge=1, le=1_000_000, description="Tokens of an answer."
    )
    random_token_ids: tuple[int, int] = Field(
        default=(1000, 2000),
        description="Range of the token ids that prompts are drawn from: FIRST,END within the "
        "vocabulary, END excluded.",
        json_schema_extra={"metavar": "FIRST,END"},
    )
    request_rate: float = Field(
        default=float("inf"),
        gt=0,
        description="Requests per second, at random times (Poisson); inf sends all at once.",
    )
    max_concurrency: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Most requests in flight."
    )
    seed: int = Field(default=0, ge=0, description="Seed of prompts and of sending times.")
    ignore_eos: bool = Field(default=False, description="Ask for answers of full length.")
    temperature: float | None = Field(
        default=None, ge=0, description="Sampling temperature. By default the server's own."
    )
    request_timeout: float = Field(default=600.0, gt=0, description="Longest time of a request.")
    percentile_metrics: tuple[Name, ...] = Field(
        default=("ttft", "tpot", "itl"),
        description="Times to report, of ttft,tpot,itl,e2el.",
        json_schema_extra={"section": "Report", "metavar": "NAME,..."},
    )
    metric_percentiles: tuple[float, ...] = Field(
        default=(99.0,),
        description="Percentiles to report of each time.",
        json_schema_extra={"metavar": "PERCENT,..."},
    )
    save_result: Path | None = Field(
        default=None, description="Write the figures to this file as JSON, under vLLM's names."
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
