"""The earlier version, once, and processes that end with their test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.compatibility.versions import NoHistory, Version, earlier, todays

from kvrouter.tools.demo.children import Children


@pytest.fixture(scope="session")
def versions() -> dict[str, Version]:
    """Both versions by name."""
    try:
        return {"earlier": earlier(), "today's": todays()}
    except NoHistory as error:
        pytest.skip(f"{error}: run with git fetch --unshallow")


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    """The processes of a test, of any version."""
    async with Children(tmp_path) as started:
        yield started
