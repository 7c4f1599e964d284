"""What an operator may change of how requests are served while they are served."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class ServingLimits:
    """Read when they are needed, never kept: `follow` changes them for what begins later."""

    max_choices: int  # that one request may ask for
    max_attempts: int  # engines asked at most for one leg of one request
    landing_timeout_s: float  # how long after the prefill leg's answer a landing is awaited
    prefill_threshold: int  # see `RouteInputs`
    model_thresholds: Mapping[str, int]  # of some aliases and models
    max_predicted_ttft_s: float = 0.0  # a prompt that would wait longer is refused; 0: none is

    def follow(self, other: ServingLimits) -> None:
        """Take over the values of `other`."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))
