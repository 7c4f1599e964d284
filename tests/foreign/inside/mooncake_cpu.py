"""vLLM's MooncakeStoreConnector on CPU engines: of CUDA it uses nothing but events."""

import torch


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


if not torch.cuda.is_available():
    torch.cuda.Event = _Event

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (  # noqa: E402
    MooncakeStoreConnector,
)


class MooncakeCpu(MooncakeStoreConnector):  # type: ignore[misc]
    pass
