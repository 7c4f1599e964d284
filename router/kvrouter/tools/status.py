"""`kvrouter status`: asks a router once about its engines, and prints a table of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Final

import aiohttp
import msgspec
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict
from tabulate import tabulate

from kvrouter.credentials.tls import Trust
from kvrouter.membership.bounded_answer import read_bounded
from kvrouter.options.complaints import UsageError
from kvrouter.options.settings import Settings
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_ANSWER_BYTES: Final = 16 << 20
HEADS: Final = (
    "engine", "role", "state", "healthy", "breaker", "load", "tokens", "index", "models", "problem"
)  # fmt: skip
_ADDRESS: Final = "start the router with --control-port and give the URL of that, or with --admin"
_TOKEN: Final = "give its admin token in KVROUTER_STATUS_TOKEN"
_ONCE: Final = "leave it out: the command asks once; `watch kvrouter status` repeats it"
_JSON: Final = "leave it out: JSON is at /workers, and at /status.json of a control port"


class StatusSettings(Settings):
    """Which router to ask."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_STATUS_", frozen=True)
    removed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--once", "--interval", "--interval-s"), _ONCE),
        **dict.fromkeys(("--json", "--json-lines"), _JSON),
        "--color": "leave it out: the table is plain text",
    }

    url: str = Field(
        default="http://127.0.0.1:8001",
        description="URL of the router's control port; without one, of its only port.",
        json_schema_extra={"section": "Settings", "positional": True},
    )
    timeout_s: float = Field(default=5.0, gt=0, description="Longest time for the router's answer.")
    token: SecretStr = Field(
        default=SecretStr(""),
        description="The router's admin token, if it needs one. Give it in the environment: other "
        "users can see flags.",
    )
    ca_file: str = Field(default="", description="PEM file of the CA of the router's certificate.")

    @field_validator("url")
    @classmethod
    def _url_of_a_router(cls, value: str) -> str:
        url = value.rstrip("/") if "://" in value else f"http://{value.rstrip('/')}"
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url {value!r}: give it as http://HOST:PORT")
        return url


class _Index(msgspec.Struct):
    state: str


class _Target(msgspec.Struct):
    """An engine or one of its ranks, as /workers lists it."""

    id: str
    circuit: str | None
    load: int
    tokens: int
    index: _Index | None


class _Worker(_Target):
    worker_type: str
    status: str
    is_healthy: bool
    ranks: list[_Target]
    models: list[str]
    problem: str | None


class _Answer(msgspec.Struct):
    workers: list[_Worker]


def run(settings: StatusSettings) -> None:
    """Print the table. UsageError: the router does not answer, or refuses."""
    try:
        answer = asyncio.run(ask(settings, "/workers", _ADDRESS))
        workers = msgspec.json.decode(answer, type=_Answer).workers
    except (msgspec.DecodeError, RecursionError):
        raise UsageError(
            f"{settings.url}/workers is of another version; use that version's kvrouter status"
        ) from None
    rows = [list(map(printable, row)) for worker in workers for row in _rows(worker)]
    sides = ["left"] * HEADS.index("load") + ["right", "right"]
    table = tabulate(rows, HEADS, tablefmt="plain", disable_numparse=True, colalign=sides)
    print(table if rows else "The router has no engines.")


async def ask(settings: StatusSettings, path: str, remedy: str) -> bytes:
    """The body of a page of the router; UsageError, which ends with `remedy`: it has none."""
    url, token = f"{settings.url}{path}", settings.token.get_secret_value()
    try:
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.get(
                url,
                headers={"authorization": f"Bearer {token}"} if token else {},
                allow_redirects=False,
                ssl=Trust(settings.ca_file).context if url.startswith("https:") else True,
                timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
            ) as answer,
        ):
            if answer.status == 200:
                return await read_bounded(answer, MAX_ANSWER_BYTES, ValueError)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise UsageError(f"{settings.url} does not answer ({_why(error)}); {remedy}") from None
    remedy = _TOKEN if answer.status == 401 else remedy
    raise UsageError(f"{url} answers {answer.status}; {remedy}")


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)
    return " ".join(str(error).split()) or "timed out"


def _rows(worker: _Worker) -> Iterator[tuple[str, ...]]:
    """Its row, and one for each of its ranks."""
    states = worker.worker_type, worker.status, "yes" if worker.is_healthy else "no"
    yield worker.id, *states, *_load(worker), ", ".join(worker.models), worker.problem or ""
    for rank in worker.ranks:
        yield rank.id, "", "", "", *_load(rank), "", ""


def _load(target: _Target) -> tuple[str, ...]:
    index = target.index.state if target.index else "-"
    return target.circuit or "-", f"{target.load:,}", f"{target.tokens:,}", index


def printable(cell: str) -> str:
    """`cell` without characters that control a terminal: engines name models and problems."""
    return "".join(c if c.isprintable() else "?" for c in cell)
