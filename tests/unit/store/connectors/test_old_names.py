"""The import paths of earlier versions, which the next release removes, and what they say."""

import importlib
import logging
import sys
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [("vllm", "connector", "KVStoreConnector"), ("vllm_tier", "tier", "KVStoreTier")],
)
def test_an_engine_that_names_the_old_path_gets_the_connector_and_one_line(
    package: str,
    module: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connector = ModuleType(module)  # the real one needs vLLM
    setattr(connector, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, f"kvrouter_store.connectors.{package}.{module}", connector)
    old = f"kvstore.connectors.{package}"
    monkeypatch.delitem(sys.modules, old, raising=False)
    for _ in range(2):
        found = importlib.import_module(old)
        assert getattr(found, name) is getattr(connector, name)
    monkeypatch.delitem(sys.modules, old)
    assert caplog.record_tuples == [
        (
            "vllm.kvstore",
            logging.WARNING,
            f"{old} is deprecated: write kvrouter_store.connectors.{package}",
        )
    ]
