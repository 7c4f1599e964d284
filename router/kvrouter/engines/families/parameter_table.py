"""The table of what each leg does with each parameter of a request. Pure data.

`parameters.py` has the rows; a family states its differences with `ParameterTable.changed`.
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
    """What one leg does with a member."""

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
    """What the parameter means to POST /tokenize, by which the router learns a prompt's tokens."""

    NOTHING = ""
    TAKES = "sent"  # it changes the tokens, and /tokenize accepts it
    BARS = "not asked"  # it changes them, but /tokenize does not accept it: only the legs know them


@dataclass(frozen=True, slots=True)
class Condition:
    """When a parameter's `Served` applies; otherwise both legs serve it."""

    text: str  # for the docs; "" for the obvious condition
    holds: Callable[[bytes], bool]  # takes the raw JSON of the value


WHERE_SET: Final = Condition("", lambda raw: raw not in _UNSET)
WHERE_NEGATIVE: Final = Condition("where negative", lambda raw: raw.startswith(b"-"))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a member of the body of a completion or chat."""

    name: str
    kinds: frozenset[Kind] = BOTH  # endpoints that know it; others pass it through
    prefill: Treatment = Treatment.KEPT
    value: bytes = b""  # raw JSON that the prefill leg sets
    decode: Treatment = Treatment.KEPT
    served: Served = Served.SPLIT  # how the request is served if `when` holds
    when: Condition = WHERE_SET
    tokenize: Tokenize = Tokenize.NOTHING
    default: bytes = b"null"  # raw JSON that means the same as no member, besides null and false
    why: str = ""  # the reason, for the docs; "" if it is obvious


class ParameterTable:
    """The rows of one family, which have unique names. Immutable."""

    def __init__(self, rows: Iterable[Parameter]) -> None:
        table = {row.name: row for row in rows}
        self.rows: Mapping[str, Parameter] = MappingProxyType(table)  # by name, in order
        # Raw JSON that the prefill leg always carries.
        self.set_on_prefill: Mapping[str, bytes] = self._values(Treatment.SET)
        # Raw JSON that replaces a client's value there.
        self.set_if_given: Mapping[str, bytes] = self._values(Treatment.SET_IF_GIVEN)
        # Members of the client that it never carries.
        self.left_out_on_prefill = self._named(
            lambda row: row.prefill in (Treatment.DROPPED, Treatment.OWN)
        )
        # Members that only the router may give, on either leg.
        self.own = self._named(lambda row: Treatment.OWN in (row.prefill, row.decode))
        # Members that /tokenize accepts, by kind.
        self.tokenized: Mapping[Kind, frozenset[str]] = {
            kind: self._tokenized(kind) for kind in ("completion", "chat")
        }
        self._alone = self._named(lambda row: row.served is Served.ALONE)
        self._refused = self._named(lambda row: row.served is Served.REFUSED)
        self._barred = self._named(lambda row: row.tokenize is Tokenize.BARS)

    def changed(self, *rows: Parameter) -> ParameterTable:
        """A table with these rows added, or in place of those of the same names."""
        return ParameterTable({**self.rows, **{row.name: row for row in rows}}.values())

    def alone(self, request: Request) -> str | None:
        """The first parameter for which one leg must serve `request`; None: none."""
        return self._first(self._alone, request)

    def refused(self, request: Request) -> str | None:
        """The first parameter with which `request` cannot be served; None: none."""
        return self._first(self._refused, request)

    def tokenizable(self, request: Request) -> bool:
        """Whether /tokenize renders the prompt of `request` as its legs do."""
        if self._barred.isdisjoint(request.spans):
            return True
        return not any(
            WHERE_SET.holds(raw) and raw != row.default
            for row, raw in self._given(self._barred, request)
        )

    def _first(self, names: frozenset[str], request: Request) -> str | None:
        if names.isdisjoint(request.spans):
            return None
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

    def _values(self, treatment: Treatment) -> Mapping[str, bytes]:
        return MappingProxyType(
            {name: row.value for name, row in self.rows.items() if row.prefill is treatment}
        )
