"""The benchmark of the layer-wise put runs, and writes what it measured."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks import layerwise_put

pytestmark = pytest.mark.torch


def test_it_measures_both_engines_and_a_plain_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    flags = ["--rounds", "1", "--tokens", "256", "--chunk-tokens", "64", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["layerwise_put", *flags])
    with pytest.raises(SystemExit) as ended:
        layerwise_put.main()
    written = json.loads(file.read_text())
    assert written["figures"]["kv_bytes"] == 4 << 20
    assert written["figures"]["ratio"] > 0
    assert 0 < written["figures"]["warm_s"] < written["figures"]["prefill_s"]
    assert 0 < written["figures"]["load_share_of_copy"] < 1
    # 1: the bar, which one round on a busy machine cannot judge
    assert written["bars"] == {"layerwise_put": ended.value.code == 0}
