"""Adds kvrouter-store to the dependencies of kvrouter while scikit-build-core builds it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StoreRequirement:
    """A provider of dynamic metadata: the kvrouter-store that a build of kvrouter needs.

    A wheel from a checkout needs the one in store/, so that `pip install .` installs both. A source
    distribution, and a wheel from it, needs the release of the same version. A development install
    needs none: it holds the store itself.
    """

    def build_state(self, state: str) -> None:
        """Remember what is being built."""
        self._editable = state.endswith("editable")
        self._released = state == "sdist" or Path("PKG-INFO").exists()

    def dynamic_metadata(
        self, _settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        """Return the dependency to add."""
        if self._editable:
            return {"dependencies": []}
        store = Path("store").absolute().as_uri()
        where = f"=={project['version']}" if self._released else f" @ {store}"
        return {"dependencies": [f"kvrouter-store{where}"]}
