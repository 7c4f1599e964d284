"""Change the installed SGLang where it calls a GPU although its device is a CPU.

on_cpu.py VERSION: changes the SGLang that this python imports. Refuses another version, and a file
that does not have what is to be changed as often as it is known to.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    """In a file below sglang/srt, a text and what replaces it, everywhere."""

    file: str
    old: str
    new: str
    times: int


PREFILL = "disaggregation/prefill.py"
POOLS = "mem_cache/pool_host"
NPU = "if _is_npu:\n    from sgl_kernel_npu.kvcacheio import"
ON_CPU = "from kvcacheio_on_cpu import transfer_kv_all_layer_lf_pf, transfer_kv_per_layer_pf_lf\n"
CHANGES = (
    # Between engines: indices on their way to the host.
    Change(PREFILL, "pin_memory=True", "pin_memory=False", 1),
    Change(PREFILL, "torch.cuda.Event()", "torch.cpu.Event()", 2),
    Change(PREFILL, "torch.cuda.current_stream()", "torch.cpu.current_stream()", 1),
    # HiCache: host memory is not registered with CUDA, and stubs/ has the kernels.
    Change(f"{POOLS}/common.py", "    if pin_memory:\n", "    if False:\n", 1),
    Change(f"{POOLS}/mha.py", NPU, ON_CPU + NPU, 1),
)


def change(root: Path, one: Change) -> None:
    """Write the file anew. Raises SystemExit if it is not as it is known."""
    path = root / one.file
    text = path.read_text()
    if (found := text.count(one.old)) != one.times:
        raise SystemExit(f"{path}: {found} times, not {one.times}: {one.old!r}")
    path.write_text(text.replace(one.old, one.new))


def main(wanted: str) -> None:
    """Make all changes, or none to another version."""
    if (installed := version("sglang")) != wanted:
        raise SystemExit(f"sglang {installed} is installed, not {wanted}")
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    for one in CHANGES:
        change(Path(spec.origin).parent / "srt", one)


if __name__ == "__main__":
    main(sys.argv[1])
