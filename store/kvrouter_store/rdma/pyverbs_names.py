"""pyverbs under one set of names: Debian's python3-pyverbs 44 and PyPI's pyverbs 57 and later.

The only module that imports pyverbs; it is itself imported only when a device is opened.
Differences: 44 has flat enumerations, later versions have the members in classes of another module;
44 does not give the descriptor of a completion channel. Pitfalls of all versions: SGE and SendWR
free nothing by themselves (`WorkRequests` does), a work request holds no reference to the next one,
MR none to the memory, and every call holds the GIL.
"""

import os
import threading
from collections.abc import Sequence

from pyverbs.addr import GID, AHAttr, GlobalRoute  # noqa: F401 (device and queue_pair use them)
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR  # noqa: F401 (device uses it)
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

try:
    from pyverbs import enums as _enums
except ImportError:
    from pyverbs import libibverbs_enums as _enums

from kvrouter_store.rdma.base import Copy

CHANNEL_TRIES = 20
# Of enum ibv_wc_status, in its order, which the ABI keeps.
STATUS_NAMES = (
    "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_EEC_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR "
    "BAD_RESP_ERR LOC_ACCESS_ERR REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR "
    "RNR_RETRY_EXC_ERR LOC_RDD_VIOL_ERR REM_INV_RD_REQ_ERR REM_ABORT_ERR INV_EECN_ERR "
    "INV_EEC_STATE_ERR FATAL_ERR RESP_TIMEOUT_ERR GENERAL_ERR TM_ERR TM_RNDV_INCOMPLETE"
)
STATUSES = STATUS_NAMES.split()


def _member(enumeration: str, name: str) -> int:
    holder = _enums if hasattr(_enums, name) else getattr(_enums, enumeration)
    return int(getattr(holder, name))


WRITE = _member("ibv_wr_opcode", "IBV_WR_RDMA_WRITE")
READ = _member("ibv_wr_opcode", "IBV_WR_RDMA_READ")
SIGNALED = _member("ibv_send_flags", "IBV_SEND_SIGNALED")
RELIABLE = _member("ibv_qp_type", "IBV_QPT_RC")
STATE_RESET = _member("ibv_qp_state", "IBV_QPS_RESET")
STATE_ERROR = _member("ibv_qp_state", "IBV_QPS_ERR")
STATE = _member("ibv_qp_attr_mask", "IBV_QP_STATE")
ACCESS_LOCAL = _member("ibv_access_flags", "IBV_ACCESS_LOCAL_WRITE")
ACCESS_REMOTE = (
    ACCESS_LOCAL
    | _member("ibv_access_flags", "IBV_ACCESS_REMOTE_WRITE")
    | _member("ibv_access_flags", "IBV_ACCESS_REMOTE_READ")
)


def status_name(status: int) -> str:
    """A work completion's status as the verbs call it, without its prefix."""
    return STATUSES[status] if 0 <= status < len(STATUSES) else f"STATUS_{status}"


def error_number(error: PyverbsError) -> int:
    """The errno that the library gave, -1 where it gave none."""
    return int(getattr(error, "error_code", -1))


def queue_pair(pd: PD, cq: CQ, depth: int) -> QP:
    """A reliable connection's end in the state RESET. Raises PyverbsError."""
    cap = QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    return QP(pd, QPInitAttr(qp_type=RELIABLE, scq=cq, rcq=cq, cap=cap, sq_sig_all=0))


def change_state(qp: QP, state: int) -> None:
    """To STATE_ERROR or STATE_RESET, which need no other attributes. Raises PyverbsError."""
    qp.modify(QPAttr(qp_state=state), STATE)


class CompletionChannel:
    """A completion channel with its descriptor, which never blocks.

    pyverbs waits for an event with the GIL held: wait for `fd` to be readable, then `take`.
    """

    _making = threading.Lock()

    def __init__(self, context: Context) -> None:
        self.native, self.fd = self._open(context)
        os.set_blocking(self.fd, False)

    def take(self, cq: CQ) -> None:
        """Take one event, if there is one, and acknowledge it: before that `cq` cannot close."""
        try:
            self.native.get_cq_event(cq)
        except PyverbsError:
            return
        cq.ack_events(1)

    def close(self) -> None:
        """Close the descriptor, after the completion queues of it."""
        self.native.close()

    @classmethod
    def _open(cls, context: Context) -> tuple[CompChannel, int]:
        if hasattr(CompChannel, "fd"):
            channel = CompChannel(context)
            return channel, int(channel.fd)
        with cls._making:
            for _ in range(CHANNEL_TRIES):
                before = _event_descriptors()
                channel = CompChannel(context)
                new = _event_descriptors() - before
                if len(new) == 1:
                    return channel, new.pop()
                channel.close()  # another library of this process opened one at the same moment
        raise PyverbsError("the descriptor of the completion channel was not found")


class WorkRequests:
    """`size` one-sided work requests, linked and allocated once and loaded again for every list.

    A list shorter than `size` is the end of the chain: only the last one, which is signalled, has
    no next one. The library copies what it posts, so a chain is free again when post_send returned.
    """

    def __init__(self, size: int) -> None:
        self._opcode = WRITE
        self._entries = [SGE(0, 0, 0) for _ in range(size)]
        self._requests: list[SendWR] = []
        for place in reversed(range(size)):
            flags = 0 if self._requests else SIGNALED
            request = SendWR(opcode=WRITE, num_sge=1, sg=[self._entries[place]], send_flags=flags)
            request.close()  # frees its own copy of the entry, and nothing else: see below
            request.sg_list = self._entries[place]
            if self._requests:
                request.next_wr = self._requests[0]
            self._requests.insert(0, request)

    def load(self, opcode: int, copies: Sequence[Copy], tag: int) -> SendWR:
        """The head of a list of these copies, at most `size`; its completion carries `tag`."""
        if opcode != self._opcode:
            self._opcode = opcode
            for request in self._requests:
                request.opcode = opcode
        first = len(self._requests) - len(copies)
        places = zip(self._entries[first:], self._requests[first:], copies, strict=True)
        for entry, request, (local_address, lkey, remote_address, rkey, length) in places:
            entry.addr = local_address
            entry.length = length
            entry.lkey = lkey
            request.set_wr_rdma(rkey, remote_address)
        self._requests[-1].wr_id = tag
        return self._requests[first]

    def close(self) -> None:
        """Free them: each entry once, whose memory the requests only point to."""
        self._requests.clear()
        while self._entries:
            self._entries.pop().close()


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "infinibandevent" in target:
            found.add(int(name))
    return found
