"""How much host memory an engine takes for KV on its way, by what its host has. Imports no vLLM."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from kvrouter_store.free_memory import free_bytes, reader

log = logging.getLogger("vllm.kvstore")

LEAST_BYTES: Final = 256 << 20
PROMPTS: Final = 8  # of the longest, for which there should be room
STEPS: Final = 4  # one is computed, one copied to host memory, one put; and one more
SHARED: Final = Path("/dev/shm")
DEVICES: Final = Path("/proc/driver/nvidia/gpus")


class Host(NamedTuple):
    """Bytes of memory, and of /dev/shm, that are free; GPUs of the host, 0 if none are known."""

    free: int
    shared: int
    devices: int

    @classmethod
    def here(cls) -> Self:
        """This host."""
        found = os.statvfs(SHARED)
        shared: int = found.f_bavail * found.f_frsize
        free = free_bytes(reader())
        devices = len(list(DEVICES.iterdir())) if DEVICES.is_dir() else 0
        return cls(shared if free is None else free, shared, devices)


def kv_bytes(vllm_config: Any, kv_cache_config: Any, tokens: int) -> int:
    """KV of so many tokens, on all ranks."""
    groups, tensors = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
    block_tokens = min(group.kv_cache_spec.block_size for group in groups)
    blocks = len(groups) * -(-tokens // block_tokens)
    ranks = vllm_config.parallel_config.world_size
    return int(blocks * ranks * (tensors[0].size // kv_cache_config.num_blocks))


def size_for(longest: int, ranks: int, host: Host) -> int:
    """A quarter of what is free, but at least PROMPTS of the longest prompts; says if it is less.

    Of several GPUs on a host each has an equal share, for their engines may start at the same time.
    Never more than half of what is free, or three quarters of /dev/shm.
    """
    free, shared = _share(ranks, host)
    size = _within(max(PROMPTS * longest, free // 4), free, shared)
    if size < PROMPTS * longest:
        log.warning(
            "the host memory for KV on its way holds %.1f of the longest prompts instead of %d, "
            "for %d MiB of memory and %d MiB of /dev/shm are free: lower --max-model-len, or give "
            "the engine more memory and --shm-size, or the prompts that do not fit are computed",
            *(size / longest, PROMPTS, free >> 20, shared >> 20),
        )
    return size


def size_beside_store(step: int, ranks: int, host: Host) -> int:
    """What STEPS steps compute, on its way to a store on this host; within the same bounds."""
    return _within(STEPS * step, *_share(ranks, host))


def _share(ranks: int, host: Host) -> tuple[int, int]:
    """Bytes of memory, and of /dev/shm, of which an engine may take a part."""
    share = min(1.0, ranks / host.devices) if host.devices else 1.0
    return int(host.free * share), int(host.shared * share)


def _within(size: int, free: int, shared: int) -> int:
    return max(LEAST_BYTES, min(size, free // 2, shared // 4 * 3))


def agreed(engine_id: str, find: Callable[[], int]) -> int:
    """What the first process of an engine finds, for all its processes map the same memory."""
    path = _agreement(engine_id)
    if path.exists():
        return int(path.read_text())
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(str(find()))
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
    return int(path.read_text())


def end_agreement(engine_id: str) -> None:
    """All processes of the engine have mapped it, or it does not start."""
    _agreement(engine_id).unlink(missing_ok=True)


def _agreement(engine_id: str) -> Path:
    return SHARED / f"vllm_offload_{engine_id}.bytes"
