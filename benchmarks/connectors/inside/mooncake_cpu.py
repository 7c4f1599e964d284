"""vLLM's MooncakeStoreConnector for engines on a CPU, loaded there by name.

The one thing that it uses of CUDA is an event, recorded before KV is read. On a CPU the KV is
complete by then, so the event here does nothing.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)


class _Event:
    def record(self, *_: object) -> None:
        """Nothing runs later."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


if not torch.cuda.is_available():
    torch.cuda.Event = _Event


class MooncakeCpuConnector(MooncakeStoreConnector):  # type: ignore[misc]
    """The same connector, by a name that engines can be given."""
