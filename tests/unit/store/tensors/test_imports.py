"""What putting tensors needs: nothing but the standard library and the core, until CUDA is used."""

import subprocess
import sys


def test_copiers_and_the_ring_import_neither_torch_nor_an_engine() -> None:
    script = (
        "import sys; before = set(sys.modules);"
        "import kvrouter_store.tensors.client, kvrouter_store.tensors.staged;"
        "import kvrouter_store.tensors.host, kvrouter_store.tensors.layers;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    foreign = set(done.stdout.split()) - sys.stdlib_module_names - {"kvrouter_store"}
    assert foreign == set()
