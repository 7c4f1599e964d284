"""Pictures of ladders, one for each planted cause, and the page that shows them.

`KVROUTER_PICTURES=1 python -m pytest tests/integration/why` draws them anew; without it, the tests
compare what they planted with the picture. `python -m tests.integration.why.pictures` prints
docs/why-causes.md.
"""

import os
import re
from pathlib import Path
from textwrap import fill
from typing import Final
from xml.sax.saxutils import escape

from kvrouter.fates.fate import REUSED, Fate

ROOT: Final = Path(__file__).resolve().parent.parent.parent.parent
PAGE: Final = ROOT / "docs" / "why-causes.md"
FOLDER: Final = ROOT / "docs" / "images" / "why"
CAUSES: Final = {
    "salt": ("Each request has its own cache_salt", Fate.OTHER_SALT),
    "block-size": ("Engines have different block sizes", Fate.OTHER_BLOCK_SIZE),
    "weights": ("The weights of one engine were renewed", Fate.OTHER_WEIGHTS),
    "hash": ("One engine names blocks with another seed", Fate.OTHER_HASH),
    "tokens": ("The tokenisers differ", Fate.OTHER_TOKENS),
    "pool": ("The store's pool is too small", Fate.EVICTED_STORE),
    "order": ("Prompts that never come back evict those that do", Fate.EVICTED_STORE),
    "no-store": ("Engines evict, and there is no store", Fate.EVICTED_ENGINE),
    "away": ("The store is away", Fate.STORE_AWAY),
    "late": ("KV lands too late", Fate.LANDED_LATE),
    "broken": ("The store loses what it promised", Fate.LOAD_FAILED),
    "affinity": ("Affinity is off", Fate.NOT_LOOKED),
    "short": ("Prompts are shorter than a block", Fate.TAIL),
}
"""What was planted, and the largest avoidable loss that follows."""

WIDTH, ROW, TOP, BAR_X, BAR_WIDTH = 720, 26, 44, 345, 300
STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #161b24 }
.all { font-weight: 600 } .share { text-anchor: end } .back { fill: #dfe3e9 }
.reused { fill: #17a898 } .first { fill: #8894a5 } .lost { fill: #e0982f } .most { fill: #c62f2f }
@media (prefers-color-scheme: dark) {
text { fill: #e8ecf3 } .back { fill: #232a35 }
.reused { fill: #37d0b8 } .first { fill: #66738a } .lost { fill: #f2b25c } .most { fill: #ff7b72 }
}"""


def shown(name: str, ladder: str) -> None:
    """Check what `kvrouter why` said, and that the picture of that cause shows it; or draw it."""
    fate = CAUSES[name][1]
    first, _, rest = ladder.partition("\n")
    assert first.partition("% ")[2].startswith(fate.words), first
    path = FOLDER / f"{name}.svg"
    if os.environ.get("KVROUTER_PICTURES"):
        path.write_text(drawn(rest, fate))
    assert f'class="most" data-fate="{fate}"' in path.read_text()


def drawn(ladder: str, most: Fate) -> str:
    """The picture of a ladder, in which `most` is the largest avoidable loss."""
    named = {fate.words: fate for fate in Fate}
    rows = re.findall(r"^ +([\d,]+) +([\d.]+)% +(.+)$", ladder, re.M)
    height = TOP + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f"<style>{STYLE}</style>",
        '<text class="all" x="0" y="22">all prompt tokens</text>',
        f'<rect class="back" x="{BAR_X}" y="10" width="{BAR_WIDTH}" height="16" rx="3"/>',
    ]
    at = 0.0
    for number, (_, share, words) in enumerate(rows):
        fate, y, width = named[words], TOP + ROW * number, float(share) / 100 * BAR_WIDTH
        brief = escape(re.split("[:,]", words)[0])
        parts += [
            f'<text x="0" y="{y + 12}">{brief}</text>',
            f'<rect class="{_kind(fate, most)}" data-fate="{fate}" x="{BAR_X + at:.1f}" y="{y}"'
            f' width="{max(width, 1):.1f}" height="16" rx="3"/>',
            f'<text class="share" x="{WIDTH - 4}" y="{y + 12}">{share} %</text>',
        ]
        at += width
    return "\n".join([*parts, "</svg>\n"])


def _kind(fate: Fate, most: Fate) -> str:
    if fate is most:
        return "most"
    return "reused" if fate in REUSED else "lost" if fate.remedy else "first"


def page() -> str:
    """docs/why-causes.md."""
    parts = ["# Causes of a low hit rate, and their ladders\n"]
    parts.append("<!-- Written by `python -m tests.integration.why.pictures`; do not edit. -->\n")
    parts.append(
        "Each picture is what [`kvrouter why`](why.md) says of simulated engines in which a test\n"
        "planted the cause. Red is the largest avoidable loss.\n"
    )
    for name, (title, fate) in CAUSES.items():
        parts.append(f"## {title}\n\n![Ladder: {fate.words}](images/why/{name}.svg)\n")
        told = f"**{fate.words}**: {fate.remedy}."
        parts.append(fill(told, 100, break_on_hyphens=False, break_long_words=False) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
