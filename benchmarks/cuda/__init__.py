"""What must hold on a GPU before KV may go from there into the store: `python -m benchmarks.cuda`.

Needs torch with CUDA, and nothing that is compiled here: a checkout is enough.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("kvrouter_store") is None:  # of the checkout; its Python modules are all that is used
    sys.path.append(str(Path(__file__).resolve().parents[2] / "store"))
