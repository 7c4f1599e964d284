"""The real kubectl, and what it is to see."""

import os
from pathlib import Path

import pytest
from tests.kubernetes.kubectl import NoKubectl, kubectl


@pytest.fixture(scope="session")
def program() -> Path:
    try:
        return kubectl()
    except NoKubectl as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{reason}: run on Linux on x86_64, with pip's index")
