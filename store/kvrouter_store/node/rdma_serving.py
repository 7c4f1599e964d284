"""Whether a store node offers RDMA: what was asked for, what is safe, what this machine has."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvrouter_store.node.rdma_responder import AttachableNode, Responder
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, TenantToken
from kvrouter_store.rdma.base import Device, RdmaUnavailable
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Opens

__all__ = ["serving_rdma"]

log = logging.getLogger(__name__)


@contextmanager
def serving_rdma(
    node: AttachableNode,
    settings: StoreSettings,
    tenants: Sequence[TenantToken],
    opens: Opens = open_device,
) -> Iterator[None]:
    """Let the connections of a started node attach until this ends.

    With --rdma auto what stands in the way is said in one sentence; with --rdma on it is a
    StartRefused.
    """
    with ExitStack() as stack:
        try:
            if settings.rdma != "off":
                _offer(stack, node, settings, tenants, opens)
        except RdmaUnavailable as problem:
            stack.close()
            if settings.rdma == "on":
                raise StartRefused(f"--rdma on: {problem}") from None
            log.info("blocks do not travel over RDMA: %s", problem)
        yield


def _offer(
    stack: ExitStack,
    node: AttachableNode,
    settings: StoreSettings,
    tenants: Sequence[TenantToken],
    opens: Opens,
) -> None:
    if len(tenants) > 1:
        raise RdmaUnavailable(
            "who attaches reaches all of the pool, and this node has several tenants: run one for "
            "each"
        )
    if settings.tls_cert_file and settings.rdma != "on":
        raise RdmaUnavailable("RDMA would carry KV beside TLS, unencrypted: --rdma on allows it")
    options = settings.rdma_options
    devices: list[Device] = []
    with ExitStack() as opened:
        for rank in range(max(1, len(options.devices()))):
            devices.append(opens(options, rank))
            opened.callback(devices[-1].close)
        opened.pop_all()
    responder = Responder(node, devices, settings.rdma_connections)
    stack.callback(responder.close)
    responder.start()
