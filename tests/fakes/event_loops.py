"""The event loop of the router's tests: uvloop, as in the product."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

__all__ = ["pytest_asyncio_loop_factories"]


@pytest.hookimpl
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on uvloop. A conftest imports this for the tests of its folder."""
    return {"uvloop": uvloop.new_event_loop}
