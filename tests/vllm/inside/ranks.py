"""Which cache groups engines of one rank and of two share; run by vLLM's python.

ranks.py MODEL URL: prints a JSON object of kind to "shared", "apart", or why an engine refuses.
"""

import json
import sys

from tests.vllm.inside.groups import KINDS, PAGE
from tests.vllm.inside.scheduled import Engine


def manifests(name: str, model: str, url: str, ranks: int) -> list[str]:
    """What an engine in the canonical layout names its blocks by, group by group."""
    settings = {
        "url": url,
        "model": name.replace(",", ""),
        "weights_revision": "none",
        "cpu_bytes_to_use": 64 * PAGE,
        "canonical_layout": True,
    }
    engine = Engine(KINDS[name], model, 64, settings, ranks=ranks)
    links = engine.connector.scheduler.manager.secondary_tiers[0].links
    named = [link.manifest.digest.hex() for link in links.values()]
    engine.close()
    return named


def told(name: str, model: str, url: str) -> str:
    """What comes of two engines of a kind."""
    try:
        one, two = (manifests(name, model, url, ranks) for ranks in (1, 2))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "shared" if one == two else "apart"


if __name__ == "__main__":
    print("\n" + json.dumps({name: told(name, *sys.argv[1:]) for name in KINDS}))
