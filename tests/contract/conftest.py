"""Tests of this folder run on uvloop."""

from tests.fakes.event_loops import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
