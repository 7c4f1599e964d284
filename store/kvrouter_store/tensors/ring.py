"""A fixed number of slots that threads take and give back; those that find none wait."""

import threading

from kvrouter_store.tensors.base import NoRoom


class Ring:
    """Slots 0 to `slots` - 1, of which each belongs to one owner at a time. Safe in threads."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a ring needs at least one slot, got {slots}")
        self._free = list(range(slots))
        self._changed = threading.Condition()

    def acquire(self, deadline_s: float) -> int:
        """A free slot, the caller's until `release`. Raises NoRoom after `deadline_s` seconds."""
        with self._changed:
            # It looks once more after the deadline, which may have met the wake-up.
            if not self._changed.wait_for(lambda: self._free, deadline_s):
                raise NoRoom(f"no slot of host memory became free within {deadline_s:g} s")
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back. ValueError where nobody has it."""
        with self._changed:
            if slot in self._free:
                raise ValueError(f"slot {slot} was given back twice")
            self._free.append(slot)
            self._changed.notify()
