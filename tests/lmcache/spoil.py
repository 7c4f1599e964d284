"""Wrong bytes in a store, as a defect of its memory would make them."""

import os

from tests.vllm.services import Service

PAGE_BYTES = 4096


def spoil(store: Service) -> None:
    """Change every page of the pool of a node behind its back."""
    with store.memory_file().open("r+b", buffering=0) as pool:
        for at in range(0, os.fstat(pool.fileno()).st_size, PAGE_BYTES):
            os.pwrite(pool.fileno(), b"spoilt", at)
