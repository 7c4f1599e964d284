"""A copier from the store's memory that is late, as a device is; run by vLLM's python."""

from random import Random
from typing import Any

from vllm.v1.kv_offload.base import TransferResult

from kvrouter_store.connectors.vllm import spec
from kvrouter_store.connectors.vllm.host_worker import HostWorker
from kvrouter_store.connectors.vllm.pool_worker import PoolRegion

FAIL = 0.05  # share of the copies
RANDOM = Random(1)


class LateWorker(HostWorker):
    """Copies from the store's memory some steps later, in any order, and sometimes fails."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: dict[int, tuple[Any, Any]] = {}

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Keep what comes from the store's memory for later."""
        if not isinstance(self._mmap_region, PoolRegion):
            return super().submit_load(job_id, src_spec, dst_spec)
        self._late[job_id] = src_spec, dst_spec
        return True

    def get_finished(self) -> list[TransferResult]:
        """What was done at once, and some of the rest."""
        for job_id in RANDOM.sample(list(self._late), RANDOM.randint(0, len(self._late))):
            self._do(job_id)
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Do these now."""
        for job_id in job_ids & self._late.keys():
            self._do(job_id)

    def shutdown(self) -> None:
        """Do all of it."""
        self.wait(set(self._late))
        super().shutdown()

    def _do(self, job_id: int) -> None:
        source, target = self._late.pop(job_id)
        if RANDOM.random() < FAIL:
            self._finished.append(TransferResult(job_id, False, 0, 0.0))
        else:
            super().submit_load(job_id, source, target)


def use_late_copies() -> None:
    """From now on, for all engines of this process."""
    vars(spec)["HostWorker"] = LateWorker
