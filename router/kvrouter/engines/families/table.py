"""What each leg does with each parameter of a request: the form of the table, and its questions.

The rows stand in `parameters.py`; a family that differs states its differences with
`ParameterTable.changed`. Pure data: nothing here sends or rewrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvrouter.openai.request import Kind, Request

BOTH: Final[frozenset[Kind]] = frozenset(("completion", "chat"))
COMPLETION: Final[frozenset[Kind]] = frozenset(("completion",))
CHAT: Final[frozenset[Kind]] = frozenset(("chat",))
_UNSET: Final = (b"null", b"false", b"[]", b'""')


class Treatment(StrEnum):
    """What becomes of a member on one leg."""

    KEPT = "kept"
    DROPPED = "dropped"
    SET = "set"
    SET_IF_GIVEN = "set where given"
    OWN = "the router's own, if any"


class Served(StrEnum):
    """How a request with the parameter is served, where its condition holds."""

    SPLIT = "both legs"
    ALONE = "decode alone"
    REFUSED = "400"


class Tokenize(StrEnum):
    """What the parameter means to POST /tokenize, which tells the router a prompt's tokens."""

    NOTHING = ""
    TAKES = "sent"
    BARS = "not asked"


@dataclass(frozen=True, slots=True)
class Condition:
    """When a parameter's `Served` applies; otherwise both legs serve it.

    Attributes:
        text: as the docs say it; "" where it goes without saying.
        holds: takes the raw JSON of the value.
    """

    text: str
    holds: Callable[[bytes], bool]


WHERE_SET: Final = Condition("", lambda raw: raw not in _UNSET)
WHERE_NEGATIVE: Final = Condition("where negative", lambda raw: raw.startswith(b"-"))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a member of the body of a completion or chat.

    Attributes:
        name: of the member.
        kinds: endpoints that know it; elsewhere it is passed through like any unknown member.
        prefill: what the prefill leg does with it.
        value: raw JSON, where that sets it.
        decode: what the decode leg does with it.
        served: how the request is served, where `when` holds.
        tokenize: `TAKES`: it changes the tokens, and /tokenize is told. `BARS`: it is not told,
            so that the legs alone know the tokens.
        default: raw JSON that means the same as leaving the member out, besides null and false.
        why: the reason, as the docs say it; "" where the fate explains itself.
    """

    name: str
    kinds: frozenset[Kind] = BOTH
    prefill: Treatment = Treatment.KEPT
    value: bytes = b""
    decode: Treatment = Treatment.KEPT
    served: Served = Served.SPLIT
    when: Condition = WHERE_SET
    tokenize: Tokenize = Tokenize.NOTHING
    default: bytes = b"null"
    why: str = ""


class ParameterTable:
    """The rows of one family, and what its rewriting asks of them. Immutable.

    Args:
        rows: of parameters; names are unique.

    Attributes:
        rows: by name, in order.
        set_on_prefill: raw JSON that the prefill leg always carries.
        set_if_given: raw JSON that it carries in place of what a client gave.
        left_out_on_prefill: members that it never carries from the client.
        own: members that only the router may give, on either leg.
        tokenized: members that /tokenize takes, for each kind.
    """

    def __init__(self, rows: Iterable[Parameter]) -> None:
        table = {row.name: row for row in rows}
        self.rows: Mapping[str, Parameter] = MappingProxyType(table)
        self.set_on_prefill: Mapping[str, bytes] = self._values(Treatment.SET)
        self.set_if_given: Mapping[str, bytes] = self._values(Treatment.SET_IF_GIVEN)
        self.left_out_on_prefill = self._named(
            lambda row: row.prefill in (Treatment.DROPPED, Treatment.OWN)
        )
        self.own = self._named(lambda row: Treatment.OWN in (row.prefill, row.decode))
        self.tokenized: Mapping[Kind, frozenset[str]] = {
            kind: self._tokenized(kind) for kind in ("completion", "chat")
        }
        self._alone = self._named(lambda row: row.served is Served.ALONE)
        self._refused = self._named(lambda row: row.served is Served.REFUSED)
        self._untold = self._named(lambda row: row.tokenize is Tokenize.BARS)

    def changed(self, *rows: Parameter) -> ParameterTable:
        """The same table with these rows in place of those of their names, or added."""
        return ParameterTable({**self.rows, **{row.name: row for row in rows}}.values())

    def alone(self, request: Request) -> str | None:
        """The first parameter for which `request` must be served by one leg, None if none."""
        names = self._alone
        return None if names.isdisjoint(request.spans) else self._served(names, request)

    def refused(self, request: Request) -> str | None:
        """The first parameter with which `request` cannot be served, None if none."""
        names = self._refused
        return None if names.isdisjoint(request.spans) else self._served(names, request)

    def tokenizable(self, request: Request) -> bool:
        """Whether /tokenize sees the prompt of `request` as its legs will."""
        if self._untold.isdisjoint(request.spans):
            return True
        return not any(
            WHERE_SET.holds(raw) and raw != row.default
            for row, raw in self._given(self._untold, request)
        )

    def _served(self, names: frozenset[str], request: Request) -> str | None:
        given = self._given(names, request)
        return next((row.name for row, raw in given if row.when.holds(raw)), None)

    def _given(self, names: frozenset[str], request: Request) -> Iterator[tuple[Parameter, bytes]]:
        for name, (start, end) in request.spans.items():
            if name in names and request.kind in self.rows[name].kinds:
                yield self.rows[name], request.body[start:end]

    def _tokenized(self, kind: Kind) -> frozenset[str]:
        return self._named(lambda row: row.tokenize is Tokenize.TAKES and kind in row.kinds)

    def _named(self, chosen: Callable[[Parameter], bool]) -> frozenset[str]:
        return frozenset(name for name, row in self.rows.items() if chosen(row))

    def _values(self, fate: Treatment) -> Mapping[str, bytes]:
        return MappingProxyType(
            {name: row.value for name, row in self.rows.items() if row.prefill is fate}
        )
