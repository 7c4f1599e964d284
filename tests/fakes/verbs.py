"""A device that does no work of its own: it takes lists and completes them when it is told to.

In the place of pyverbs_names for a VerbsQueuePair. What it cannot show is shown on a real device.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kvrouter_store.rdma.base import Copy, LinkType
from kvrouter_store.rdma.ports import Port
from kvrouter_store.rdma.queue_pair import VerbsQueuePair

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["FakeDevice", "FakeVerbs", "Posted"]

ERRORS = {5: "WR_FLUSH_ERR", 10: "REM_ACCESS_ERR"}
FLUSHED = 5
PORT = Port("fake0", 1, LinkType.ETHERNET, 1, bytes(16), 0, routed=True)


class FakeError(Exception):
    """In the place of PyverbsError."""


@dataclass
class Posted:
    """A list as it was posted."""

    opcode: int
    copies: list[Copy]
    tag: int


@dataclass
class Completion:
    """In the place of a WC."""

    wr_id: int
    status: int = 0


@dataclass
class Attributes:
    """Of a device, a port and a queue pair alike."""

    max_qp_rd_atom: int = 16
    max_qp_init_rd_atom: int = 4
    active_mtu: int = 5
    max_msg_sz: int = 1 << 23


class FakeVerbs:
    """The names, and what was done through them. `at_once`: each list completes when posted."""

    WRITE, READ, STATE_ERROR, STATE_RESET, ACCESS_REMOTE = range(5)
    PyverbsError = FakeError

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.posted: list[Posted] = []
        self.most_under_way = 0
        self.under_way: list[Posted] = []
        self.done: list[Completion] = []
        self.states: list[int] = []
        self.closed: list[str] = []
        self.refuses_work = False
        self.readable, self._events = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def complete(self, status: int = 0) -> None:
        """The oldest list under way; a status other than 0 is that of its first copy."""
        oldest = self.under_way.pop(0)
        if status:
            self.done.append(Completion(0, status))
        self.done.append(Completion(oldest.tag, FLUSHED if status else 0))
        os.write(self._events, b"!")

    def CompletionChannel(self, context: object) -> "FakeVerbs":
        """See CompletionChannel; it is this object itself."""
        return self

    @property
    def native(self) -> None:
        """Nothing."""

    @property
    def fd(self) -> int:
        """Readable when a list completed."""
        return self.readable

    def take(self, queue: object) -> None:
        """Take the events."""
        os.read(self.readable, 4096)

    def close(self) -> None:
        """Close what the queue pair opened."""
        self.closed.append("closed")

    def CQ(self, *arguments: object) -> "FakeVerbs":
        """The completion queue; it is this object itself."""
        return self

    def req_notify(self) -> None:
        """Events come anyway."""

    def poll(self, number: int) -> tuple[int, list[Completion]]:
        """What has completed."""
        taken, self.done = self.done, []
        return len(taken), taken

    def queue_pair(self, *arguments: object) -> "FakeVerbs":
        """The queue pair; it is this object itself."""
        return self

    @property
    def qp_num(self) -> int:
        """Some number."""
        return 17

    def WorkRequests(self, size: int) -> "FakeVerbs":
        """The work requests; they are this object itself."""
        return self

    def load(self, opcode: int, copies: Sequence[Copy], tag: int) -> Posted:
        """A list to be posted."""
        return Posted(opcode, list(copies), tag)

    def post_send(self, posted: Posted) -> None:
        """Take a list."""
        if self.refuses_work:
            raise FakeError("Failed to post send. Errno: 12")
        self.posted.append(posted)
        self.under_way.append(posted)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        if self.at_once:
            self.complete()

    def change_state(self, pair: object, state: int) -> None:
        """To ERR everything under way is flushed."""
        self.states.append(state)
        while state == self.STATE_ERROR and self.under_way:
            self.complete(FLUSHED)

    def status_name(self, status: int) -> str:
        """As the verbs call it."""
        return ERRORS[status]


@dataclass
class FakeDevice:
    """What a queue pair needs of its device."""

    verbs: FakeVerbs
    port: Port = PORT
    context: Any = None
    domain: Any = None
    attributes: Any = field(default_factory=Attributes)
    port_attributes: Any = field(default_factory=Attributes)
    gone: list[VerbsQueuePair] = field(default_factory=list)

    def queue_pair(self) -> VerbsQueuePair:
        """A queue pair on these verbs."""
        return VerbsQueuePair(cast("ModuleType", self.verbs), self, self.gone.append)
