"""Makes docs/images/status-*.png: the page under load with a dead engine, in both colours.

`python -m tests.page.screenshots [FOLDER]`; takes a minute.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.page import browser as driver
from tests.page.cluster import Cluster, cluster, load

ROOT = Path(__file__).resolve().parent.parent.parent
PORTS = (8101, 8102, 8103, 8111, 8112, 8113)
CLIENTS = 22
LOADED_S = 30
DESKTOP = (1280, 800)
PHONE = (390, 844)


async def pictures(chromium: str, folder: Path, work: Path) -> None:
    """Start all of it, wait until there is something to see, and look at it."""
    running = cluster(work, prefill=3, decode=3, ports=PORTS, disk=True)
    watching = driver.start(chromium, work / "profile")
    async with running as here, load(here.router.http, CLIENTS), watching as browser:
        tab = await browser.open()
        await tab.look(*DESKTOP, scheme="dark")
        await tab.go(here.page)
        await tab.until("document.querySelectorAll('#request-rows tr:not(.free)').length > 3")
        await asyncio.sleep(LOADED_S)
        await kill(here, tab)
        await tab.picture(folder / "status-dark.png", after_s=6)
        await tab.look(*DESKTOP, scheme="light")
        await tab.picture(folder / "status-light.png", after_s=1.5)
        await tab.look(*PHONE, scheme="dark", scale=2)
        await tab.picture(folder / "status-phone.png", most=1640, after_s=1.5)
        if tab.complaints:
            raise SystemExit("\n".join(tab.complaints))


async def kill(here: Cluster, tab: driver.Tab) -> None:
    """One engine dies, and the page shows it."""
    await here.children.kill(here.engines["prefill-1"])
    await tab.until("document.querySelector('#engine-rows tr.away')")


def main() -> int:
    """Make them; 2 where there is no browser."""
    chromium = driver.find_chromium()
    if chromium is None:
        print("screenshots: no Chromium here (on Debian: apt-get install chromium)")
        return 2
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvrouter-page-") as name:
        asyncio.run(pictures(chromium, folder, Path(name)))
    for path in sorted(folder.glob("status-*.png")):
        print(f"{path}  {path.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
