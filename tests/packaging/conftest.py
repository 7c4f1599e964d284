"""The distributions, built once."""

import os
from pathlib import Path

import pytest
from tests.packaging.build import build


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with source distributions and wheels; KVROUTER_WHEELS names one to keep."""
    named = os.environ.get("KVROUTER_WHEELS")
    folder = Path(named) if named else tmp_path_factory.mktemp("dist")
    build(folder)
    return folder
