"""The accounts of the fair queue: the tokens of each tenant's turns.

Start-time fair queuing (Goyal, Vin and Cheng, 1996) of tokens, as the Virtual Token Counter (Sheng
et al., 2024): the tenant with the smallest account has the next turn. While two tenants both have
requests waiting, the tokens of their turns differ by a request of each at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

_RISE: Final = 1 / 8
"""Part of each turn by which the level rises above the account that paid for it.

With 0, new tenants that never stop coming would all begin at the same level, and one that owes
would wait for ever.
"""
_MOST_ABSENT: Final = 4096


class Accounts:
    """A synchronous state machine. Only the differences between accounts mean something.

    Attributes:
        spent: tokens by tenant. Those of absent tenants stay: who pauses owes as much as before.
        era: rises when accounts are forgotten: what was charged before means nothing then.
    """

    __slots__ = ("_level", "era", "spent")

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.era = 0
        self._level = 0.0

    def open(self, tenant: str, waiting: Collection[str]) -> None:
        """`tenant` begins to wait, beside those `waiting`: idle time has earned it nothing.

        If too many absent tenants have accounts, all of them are forgotten: so many turns after its
        own, a tenant owes little.
        """
        if len(self.spent) > len(waiting) + _MOST_ABSENT:
            self.spent = {each: self.spent[each] for each in waiting}
            self.era += 1
        self.spent[tenant] = max(self._level, self.spent.get(tenant, 0.0))

    def charge(self, tenant: str, tokens: int) -> None:
        """The turn of `tenant` has come, for a request of so many tokens."""
        spent = self.spent[tenant]
        self.spent[tenant] = spent + tokens
        self._level = max(self._level, spent + tokens * _RISE)

    def correct(self, tenant: str, tokens: int, era: int) -> None:
        """A request has used so many tokens more than were charged in `era`; negative: fewer."""
        if era == self.era and tenant in self.spent:
            self.spent[tenant] += tokens

    def close(self) -> None:
        """Nobody lacks anything: nobody owes anything."""
        self.spent.clear()
        self.era += 1
        self._level = 0.0
