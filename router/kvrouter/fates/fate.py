"""The fates of prompt tokens; `fates.toml` has what they mean."""

from __future__ import annotations

from enum import StrEnum, auto
from importlib.resources import files
from tomllib import loads
from typing import Final


class Fate(StrEnum):
    """The one fate of a prompt token; a label of the metrics."""

    ENGINE = auto()
    LOWER = auto()
    STORE = auto()
    NEIGHBOUR = auto()
    FIRST_USE = auto()
    TAIL = auto()
    OTHER_SALT = auto()
    OTHER_ADAPTER = auto()
    OTHER_VERSION = auto()
    OTHER_WEIGHTS = auto()
    OTHER_MANIFEST = auto()
    OTHER_BLOCK_SIZE = auto()
    OTHER_HASH = auto()
    OTHER_TOKENS = auto()
    EVICTED_STORE = auto()
    EVICTED_ENGINE = auto()
    ON_ITS_WAY = auto()
    LANDED_LATE = auto()
    BUSY_ELSEWHERE = auto()
    NOT_LOOKED = auto()
    STORE_AWAY = auto()
    LOAD_FAILED = auto()
    NOT_SHARED = auto()
    NOT_REPORTED = auto()
    UNKNOWN = auto()

    @property
    def words(self) -> str:
        """What it means."""
        return _TEXTS[self]["words"]

    @property
    def remedy(self) -> str:
        """What to do about it; "": it is no loss."""
        return _TEXTS[self].get("remedy", "")


_TEXTS: Final[dict[str, dict[str, str]]] = loads(
    (files("kvrouter.fates") / "fates.toml").read_text("utf-8")
)
REUSED: Final = (Fate.ENGINE, Fate.LOWER, Fate.STORE, Fate.NEIGHBOUR)
