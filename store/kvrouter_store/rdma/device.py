"""RDMA devices over pyverbs: opening them, registering memory, making queue pairs."""

import contextlib
import errno
import importlib
import logging
import resource
from pathlib import Path
from types import ModuleType
from typing import Any

from kvrouter_store.rdma.base import Device, MemoryRegistration, QueuePair, RdmaUnavailable
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import SYSFS, Port, choose_port
from kvrouter_store.rdma.queue_pair import VerbsQueuePair

log = logging.getLogger(__name__)

NAMES = "kvrouter_store.rdma.pyverbs_names"
MAX_PINNED = "with `ulimit -l unlimited`, LimitMEMLOCK=infinity or `docker run --ulimit memlock=-1`"


def open_device(options: RdmaOptions, rail: int = 0, sysfs: Path = SYSFS) -> Device:
    """Open the device that the options mean for this rail.

    Raises RdmaUnavailable, with one sentence and its remedy, where there is no device, no port that
    is up, no pyverbs, or no permission.
    """
    port = choose_port(options, rail, sysfs)
    device = VerbsDevice(load_pyverbs(), port)
    log.info("RDMA over %s", port)
    return device


class VerbsRegistration:
    """Memory registered with a device: see base.MemoryRegistration."""

    def __init__(self, device: "VerbsDevice", native: Any, address: int, length: int) -> None:
        self.address = address
        self.length = length
        self.lkey = int(native.lkey)
        self.rkey = int(native.rkey)
        self._native: Any = native
        self._device = device

    def close(self) -> None:
        """See base.MemoryRegistration."""
        native, self._native = self._native, None
        if native is not None:
            native.close()
            self._device.registrations.discard(self)


class VerbsDevice:
    """An open device: see base.Device. Raises RdmaUnavailable where it cannot be opened."""

    def __init__(self, names: ModuleType, port: Port) -> None:
        self._names = names
        self.name = port.device
        self.port = port
        self.registrations: set[VerbsRegistration] = set()
        self.queue_pairs: set[VerbsQueuePair] = set()
        try:
            self.context: Any = names.Context(name=port.device)
            self.attributes = self.context.query_device()
            self.port_attributes = self.context.query_port(port.number)
            self.domain: Any = names.PD(self.context)
        except names.PyverbsError as error:
            raise _not_opened(port, names.error_number(error), error) from error

    def register(self, address: int, length: int, remote: bool) -> MemoryRegistration:
        """See base.Device."""
        if address < 1 or length < 1:
            raise ValueError(f"there is no memory of {length} bytes at {address:#x}")
        access = self._names.ACCESS_REMOTE if remote else self._names.ACCESS_LOCAL
        try:
            native = self._names.MR(self.domain, length, access, address=address)
        except self._names.PyverbsError as error:
            number = self._names.error_number(error)
            raise _not_registered(self.name, length, number, error) from error
        made = VerbsRegistration(self, native, address, length)
        self.registrations.add(made)
        return made

    def queue_pair(self) -> QueuePair:
        """See base.Device."""
        try:
            made = VerbsQueuePair(self._names, self, self.queue_pairs.discard)
        except self._names.PyverbsError as error:
            raise RdmaUnavailable(f"{self.name} gives no more queue pairs: {error}") from error
        self.queue_pairs.add(made)
        return made

    def close(self) -> None:
        """See base.Device."""
        for queue_pair in tuple(self.queue_pairs):
            queue_pair.close()
        for registration in tuple(self.registrations):
            registration.close()
        with contextlib.suppress(self._names.PyverbsError):
            self.domain.close()
            self.context.close()


def load_pyverbs() -> ModuleType:
    """Pyverbs under the names of `pyverbs_names`. Raises RdmaUnavailable where it is missing.

    Importing pyverbs sets up the root logger; that is undone.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return importlib.import_module(NAMES)
    except ModuleNotFoundError as error:
        raise RdmaUnavailable(
            f"RDMA needs pyverbs, which this Python does not find ({error}): install Debian's "
            "python3-pyverbs, or pyverbs from PyPI with the rdma-core of its version"
        ) from error
    except ImportError as error:
        raise RdmaUnavailable(
            f"pyverbs does not load here ({error}): it must be of the version of this machine's "
            "rdma-core"
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _not_opened(port: Port, number: int, error: Exception) -> RdmaUnavailable:
    if number in (errno.EPERM, errno.EACCES, errno.ENOENT):
        remedy = "give this process /dev/infiniband (`docker run --device /dev/infiniband`)"
    else:
        remedy = "see `ibv_devinfo`"
    return RdmaUnavailable(f"the RDMA device {port.device} cannot be opened ({error}): {remedy}")


def _not_registered(name: str, length: int, number: int, error: Exception) -> RdmaUnavailable:
    asked = f"{name} does not register {length} bytes of memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if number in (errno.ENOMEM, errno.EPERM) and limit != resource.RLIM_INFINITY:
        return RdmaUnavailable(
            f"{asked}: this process may lock {limit} in all; raise that {MAX_PINNED}"
        )
    if number == errno.EFAULT:
        return RdmaUnavailable(f"{asked}: not all of it is mapped and writable")
    return RdmaUnavailable(f"{asked} ({error})")
