"""What "adapter_params" may hold in LMCache's --l2-adapter."""

from dataclasses import dataclass
from typing import ClassVar

from kvrouter_store.connectors.settings import LinkSettings


@dataclass(frozen=True)
class L2Settings(LinkSettings):
    """The settings of `LinkSettings` without `model`, and two more.

    weights_revision: servers share objects only under the same one: LMCache's keys name the model,
        and not its weights.
    threads: so many look up, as many store, and as many load.
    lock_s: seconds after which what LMCache found and did not unlock may be evicted all the same.
    """

    PLACE: ClassVar[str] = '"adapter_params" in --l2-adapter'

    threads: int = 4
    lock_s: float = 300.0

    def check(self) -> None:
        """Raise ValueError where a value cannot be meant."""
        super().check()
        if self.model:
            raise ValueError('"model" is not a setting: LMCache names the model of each object')
        if self.threads < 1:
            raise ValueError('"threads" must be at least 1')
        if self.lock_s <= 0:
            raise ValueError('"lock_s" must be a positive number of seconds')
