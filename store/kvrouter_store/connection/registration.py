"""The ids that a node gave to a manifest."""

from dataclasses import dataclass, field

from kvrouter_store._core import BlockNames


@dataclass(frozen=True, slots=True)
class Registration:
    """The ids that one server (of this epoch) gave to a manifest."""

    epoch: int
    manifest_id: int
    spec_id: int
    part_ids: tuple[int, ...]
    names: BlockNames = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", BlockNames(self.spec_id, self.part_ids))
