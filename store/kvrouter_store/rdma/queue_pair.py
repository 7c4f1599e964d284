"""A reliable connection over pyverbs: lists of one-sided copies, posted and waited for."""

import contextlib
import math
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.rdma.base import Copy, LinkType, RdmaEndpoint, TransferFailed
from kvrouter_store.rdma.ports import Port

# Copies in a list, of which only the last asks for a completion, and lists in flight at a time: the
# next one is loaded while the device works.
LIST_LENGTH = 64
LISTS_POSTED = 4
DEPTH = LIST_LENGTH * LISTS_POSTED
READS = 16
# A silent peer is given up after (RETRIES + 1) waits of 4.096 us * 2**TIMEOUT, 67 ms each: half a
# second on Soft-RoCE; an adapter may wait up to four times as long. 7 retries mean "for ever".
TIMEOUT = 14
RETRIES = 6
RNR_TIMER = 12
HOPS = 64
FLUSH_S = 2.0
MAX_WAIT_S = 3600.0
CUT_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Opened(Protocol):
    """What a queue pair needs of its device."""

    port: Port
    context: Any
    domain: Any
    attributes: Any
    port_attributes: Any


class VerbsQueuePair:
    """See base.QueuePair. Raises the PyverbsError of `names` where the device has none left.

    gone: is called when it was closed.
    """

    def __init__(
        self, names: ModuleType, device: Opened, gone: Callable[["VerbsQueuePair"], None]
    ) -> None:
        self.work_requests = 0
        self.signalled_completions = 0
        self.posted_bytes = 0
        self._names = names
        self._device = device
        self._gone = gone
        self._completed = 0  # lists: they complete in the order of their posting
        self._fenced = False
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._channel = names.CompletionChannel(device.context)
            undo.callback(self._channel.close)
            self._cq = names.CQ(device.context, DEPTH + 1, None, self._channel.native, 0)
            undo.callback(self._cq.close)
            self._qp = names.queue_pair(device.domain, self._cq, DEPTH)
            undo.callback(self._qp.close)
            self._requests = names.WorkRequests(LIST_LENGTH)
            undo.callback(self._requests.close)
            self._frees = undo.pop_all()
        self.endpoint = self._describe()

    @property
    def descriptor(self) -> int:
        """Of its own; readable when a completion came."""
        return int(self._channel.fd)

    def connect(self, peer: RdmaEndpoint) -> None:
        """See base.QueuePair. Raises TransferFailed where the peer cannot be reached from here."""
        port = self._device.port
        if peer.link_type != port.link_type:
            raise TransferFailed("CONNECT", f"the peer's link is not of the type of {port}")
        try:
            self._qp.to_rts(self._attributes(peer))
        except self._names.PyverbsError as error:
            raise TransferFailed("CONNECT", f"{port} does not reach the peer: {error}") from error

    def write(self, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        """See base.QueuePair. Raises TransferFailed, DeadlineExceeded; it is then fenced."""
        self._transfer(self._names.WRITE, copies, deadline, cut)

    def read(self, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        """See base.QueuePair. Raises TransferFailed, DeadlineExceeded; it is then fenced."""
        self._transfer(self._names.READ, copies, deadline, cut)

    def fence(self) -> None:
        """See base.QueuePair."""
        if self._fenced:
            return
        self._fenced = True
        with contextlib.suppress(self._names.PyverbsError):
            self._names.change_state(self._qp, self._names.STATE_ERROR)
            self._reap_flushed(time.monotonic() + FLUSH_S)
        # In ERR the kernel's software device may still be at work on the packet that came last; to
        # RESET it goes only when nothing of this queue pair runs.
        with contextlib.suppress(self._names.PyverbsError):
            self._names.change_state(self._qp, self._names.STATE_RESET)

    def close(self) -> None:
        """See base.QueuePair."""
        if self._closed:
            return
        self._closed = True
        self.fence()
        self._frees.close()
        self._gone(self)

    def _describe(self) -> RdmaEndpoint:
        port = self._device.port
        return RdmaEndpoint(
            qp_number=self._qp.qp_num,
            psn=secrets.randbits(24),
            gid=port.gid,
            lid=port.lid,
            mtu_code=int(self._device.port_attributes.active_mtu),
            link_type=port.link_type,
            reads=max(1, min(READS, int(self._device.attributes.max_qp_rd_atom))),
        )

    def _attributes(self, peer: RdmaEndpoint) -> Any:
        """For every state on the way to RTS."""
        attributes = self._names.QPAttr(port_num=self._device.port.number)
        attributes.qp_access_flags = self._names.ACCESS_REMOTE
        attributes.ah_attr = self._path(peer)
        attributes.path_mtu = min(self.endpoint.mtu_code, peer.mtu_code)
        attributes.dest_qp_num = peer.qp_number
        attributes.rq_psn = peer.psn
        attributes.sq_psn = self.endpoint.psn
        attributes.max_dest_rd_atomic = self.endpoint.reads
        own_reads = int(self._device.attributes.max_qp_init_rd_atom)
        attributes.max_rd_atomic = max(1, min(READS, own_reads, peer.reads))
        attributes.min_rnr_timer = RNR_TIMER
        attributes.timeout = TIMEOUT
        attributes.retry_cnt = RETRIES
        attributes.rnr_retry = RETRIES
        return attributes

    def _path(self, peer: RdmaEndpoint) -> Any:
        port = self._device.port
        if not port.routed:
            return self._names.AHAttr(dlid=peer.lid, port_num=port.number)
        words = ":".join(peer.gid[at : at + 2].hex() for at in range(0, 16, 2))
        route = self._names.GlobalRoute(
            dgid=self._names.GID(words), sgid_index=port.gid_index, hop_limit=HOPS
        )
        lid = peer.lid if port.link_type == LinkType.INFINIBAND else 0
        return self._names.AHAttr(gr=route, is_global=1, dlid=lid, port_num=port.number)

    def _transfer(self, opcode: int, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        if self._fenced:
            raise TransferFailed("WR_FLUSH_ERR", "the queue pair has failed before")
        longest = int(self._device.port_attributes.max_msg_sz)
        try:
            for some in lists_of(copies, LIST_LENGTH, longest):
                self._await_room(LISTS_POSTED - 1, deadline, cut)
                deadline.left_s()  # a software device does the work while it is posted
                self._post(opcode, some)
            self._await_room(0, deadline, cut)
        except BaseException:
            self.fence()  # before the caller's memory is used for anything else
            raise

    def _post(self, opcode: int, copies: Sequence[Copy]) -> None:
        head = self._requests.load(opcode, copies, self.signalled_completions + 1)
        try:
            self._qp.post_send(head)
        except self._names.PyverbsError as error:
            raise TransferFailed("POST", f"{self._device.port} takes no work: {error}") from error
        self.signalled_completions += 1
        self.work_requests += len(copies)
        self.posted_bytes += sum(copy.length for copy in copies)

    def _await_room(self, posted: int, deadline: Deadline, cut: int) -> None:
        """Return when at most `posted` lists are in flight."""
        while self.signalled_completions - self._completed > posted:
            if self._reap():
                continue
            self._cq.req_notify()
            if self._reap():  # one may have come before the request to notify
                continue
            self._wait(deadline, cut)

    def _wait(self, deadline: Deadline, cut: int) -> None:
        waits = select.poll()
        waits.register(cut, CUT_EVENTS)
        waits.register(self._channel.fd, select.POLLIN)
        ready = dict(waits.poll(math.ceil(min(deadline.left_s(), MAX_WAIT_S) * 1000)))
        if self._channel.fd in ready:
            self._channel.take(self._cq)
        elif cut in ready:
            raise TransferFailed(TransferFailed.CUT, "the control channel was cut")

    def _reap(self) -> bool:
        """Take what has completed, if anything. Raises TransferFailed for the first that failed."""
        completions = self._take_completions()
        status = next((each.status for each in completions if each.status), 0)
        if status:
            failure = self._names.status_name(status)
            raise TransferFailed(failure, f"{self._device.port}: a copy ended with {failure}")
        return bool(completions)

    def _take_completions(self) -> Sequence[Any]:
        """Completions of whole lists carry the list's number; those of others, which failed, 0."""
        _, completions = self._cq.poll(DEPTH)
        for completion in completions:
            self._completed = max(self._completed, completion.wr_id)
        return cast("Sequence[Any]", completions)

    def _reap_flushed(self, until: float) -> None:
        """Wait for the last list posted: whatever its outcome, the device is done then."""
        while self._completed < self.signalled_completions:
            self._cq.req_notify()
            if self._take_completions():
                continue
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            waits = select.poll()
            waits.register(self._channel.fd, select.POLLIN)
            waits.poll(math.ceil(left_s * 1000))
            self._channel.take(self._cq)


def lists_of(copies: Sequence[Copy], size: int, longest: int) -> Iterator[Sequence[Copy]]:
    """Lists of at most `size` copies, each of at most `longest` bytes, in their order.

    Raises ValueError for a copy of no bytes, which a device would take for one of 2 GiB.
    """
    short = copies if all(0 < copy.length <= longest for copy in copies) else _cut(copies, longest)
    for first in range(0, len(short), size):
        yield short[first : first + size]


def _cut(copies: Sequence[Copy], longest: int) -> list[Copy]:
    """The same bytes in copies of at most `longest`."""
    short: list[Copy] = []
    for copy in copies:
        if copy.length < 1:
            raise ValueError(f"a copy has at least one byte, not {copy.length}")
        for done in range(0, copy.length, longest):
            short.append(
                Copy(
                    copy.local_address + done,
                    copy.lkey,
                    copy.remote_address + done,
                    copy.rkey,
                    min(longest, copy.length - done),
                )
            )
    return short
