"""A process with LMCache's memory and one adapter in it, as LMCache's controllers would use it."""

import json
import socket
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 60


def plugin(**params: Any) -> dict[str, Any]:
    """What --l2-adapter says to use the adapter."""
    return {
        "type": "plugin",
        "shared": True,
        "module_path": "kvrouter_store.connectors.lmcache",
        "class_name": "KVStoreL2",
        "adapter_params": params,
    }


class AdapterFailed(Exception):
    """The process said that a step raised; the text is what."""


class AdapterProcess:
    """Ends with its connection. Keys are numbers of chunks; `salt` is their cache_salt.

    Each object holds bytes that follow from its key, so that any process can tell whether they
    are right.
    """

    def __init__(self, path: str, params: dict[str, Any]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(TIMEOUT_S)
        self._connection.connect(path)
        self._answers = self._connection.makefile()
        try:
            self._ask("open", adapter=plugin(**params))
        except BaseException:
            self.end()
            raise

    def store(self, numbers: list[int], **of: Any) -> dict[str, Any]:
        """Store objects: `stored` and `bytes` as LMCache is told."""
        found: dict[str, Any] = self._ask("store", numbers=numbers, **of)
        return found

    def find(self, numbers: list[int], **of: Any) -> list[int]:
        """Look objects up and lock them: those that were found."""
        found: list[int] = self._ask("find", numbers=numbers, **of)
        return found

    def load(self, numbers: list[int], **of: Any) -> list[int]:
        """Load objects: those that came. Raises AdapterFailed where one came with other bytes."""
        came: list[int] = self._ask("load", numbers=numbers, **of)
        return came

    def unlock(self, numbers: list[int], **of: Any) -> None:
        """Unlock objects."""
        self._ask("unlock", numbers=numbers, **of)

    def delete(self, numbers: list[int], **of: Any) -> None:
        """Delete objects."""
        self._ask("delete", numbers=numbers, **of)

    def fds(self) -> list[int]:
        """The three eventfds."""
        found: list[int] = self._ask("fds")
        return found

    def status(self) -> dict[str, Any]:
        """What LMCache's /status shows of the adapter."""
        found: dict[str, Any] = self._ask("status")
        return found

    def usage(self) -> dict[str, Any]:
        """What LMCache's eviction and quotas are told."""
        found: dict[str, Any] = self._ask("usage")
        return found

    def heard(self) -> dict[str, list[int]]:
        """Of which objects a listener was told that they were stored, used and deleted."""
        found: dict[str, list[int]] = self._ask("heard")
        return found

    def close(self) -> dict[str, Any]:
        """Close the adapter; the `threads` and `descriptors` that are left over."""
        found: dict[str, Any] = self._ask("close")
        return found

    def _ask(self, step: str, **arguments: Any) -> Any:
        self._connection.sendall(json.dumps({"step": step, **arguments}).encode() + b"\n")
        for line in self._answers:
            if line.startswith("{"):  # other lines are LMCache's log
                answer = json.loads(line)
                if "raised" in answer:
                    raise AdapterFailed(answer["raised"])
                return answer["found"]
        raise AdapterFailed(f"the process ended at {step}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the process as it is. Idempotent."""
        self._answers.close()
        self._connection.close()
