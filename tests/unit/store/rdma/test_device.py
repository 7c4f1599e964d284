"""What is said when a device cannot be opened or memory not registered, on verbs that refuse."""

import errno
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.verbs import PORT

from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.device import VerbsDevice


class RefusedError(Exception):
    """In the place of PyverbsError, with an errno."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Failed. Errno: {number}, {os.strerror(number)}")
        self.number = number


class Verbs:
    """The names of pyverbs that a device needs; each refuses with the errno that it is given."""

    PyverbsError = RefusedError
    ACCESS_LOCAL, ACCESS_REMOTE = 1, 7

    def __init__(self, **refusals: int) -> None:
        self._refusals = refusals
        self.closed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def make(*_: object, **__: object) -> SimpleNamespace:
            if name in self._refusals:
                raise RefusedError(self._refusals[name])
            return SimpleNamespace(
                lkey=1,
                rkey=2,
                query_device=SimpleNamespace,
                query_port=lambda _: SimpleNamespace(),
                close=lambda: self.closed.append(name),
            )

        return make

    def error_number(self, error: RefusedError) -> int:
        return error.number


def device(**refusals: int) -> VerbsDevice:
    return VerbsDevice(Verbs(**refusals), PORT)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT])
def test_a_device_file_that_is_not_there_or_not_ours_is_named(number: int) -> None:
    with pytest.raises(RdmaUnavailable, match="give this process /dev/infiniband") as problem:
        device(Context=number)
    assert os.strerror(number) in str(problem.value)


def test_another_failure_to_open_leads_to_the_tool_that_looks_at_devices() -> None:
    with pytest.raises(RdmaUnavailable, match=r"cannot be opened .*: see `ibv_devinfo`"):
        device(PD=errno.EIO)


def test_memory_that_may_not_be_locked_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    with pytest.raises(RdmaUnavailable, match=r"may lock 65536 in all; raise that with `ulimit"):
        device(MR=errno.ENOMEM).register(4096, 1 << 20, remote=True)


def test_a_device_out_of_memory_of_its_own_is_not_taken_for_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    with pytest.raises(RdmaUnavailable, match=r"fake0 does not register .* Cannot allocate"):
        device(MR=errno.ENOMEM).register(4096, 1 << 20, remote=True)


def test_memory_that_is_not_mapped_is_told_so() -> None:
    with pytest.raises(RdmaUnavailable, match="not all of it is mapped and writable"):
        device(MR=errno.EFAULT).register(4096, 1 << 20, remote=False)


def test_a_device_without_queue_pairs_left_says_so() -> None:
    with pytest.raises(RdmaUnavailable, match="fake0 gives no more queue pairs"):
        device(CompletionChannel=errno.EMFILE).queue_pair()


def test_what_was_registered_is_given_back_once_and_before_the_device() -> None:
    verbs = Verbs()
    opened = VerbsDevice(verbs, PORT)  # type: ignore[arg-type]
    first = opened.register(4096, 4096, remote=False)
    opened.register(8192, 4096, remote=True)
    first.close()
    first.close()
    opened.close()
    assert verbs.closed == ["MR", "MR", "PD", "Context"]
