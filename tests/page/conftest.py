"""One Chromium for all tests of the page, and a tab for each of them."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.page import browser as driver

MISSING = "no Chromium here (on Debian: apt-get install chromium)"


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path; KVROUTER_CHROMIUM names another one."""
    found = os.environ.get("KVROUTER_CHROMIUM") or driver.find_chromium()
    if found is None:
        pytest.skip(MISSING)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(
    chromium: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[driver.Browser]:
    """The browser of a module's tests."""
    async with driver.start(chromium, tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: driver.Browser) -> AsyncIterator[driver.Tab]:
    """A page in a profile of its own; it must have complained of nothing."""
    opened = await browser.open()
    yield opened
    await opened.call("Page.close")
    assert opened.complaints == []
