"""What "adapter_params" may say; what it cannot mean is refused in one sentence."""

from typing import Any

import pytest

from kvrouter_store.connectors.lmcache.settings import L2Settings
from kvrouter_store.connectors.settings import ConnectorRefused

URL = {"url": "kv://127.0.0.1:7400"}


def test_a_url_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_STORE_TOKEN", "t" * 32)
    settings = L2Settings.of(URL)
    assert (settings.threads, settings.lock_s, settings.token) == (4, 300.0, "t" * 32)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, '"url" is missing'),
        ({**URL, "uri": "x"}, "'uri' is not a setting"),
        ({**URL, "save": "all"}, "'save' is not a setting"),
        ({**URL, "model": "tiny"}, '"model" is not a setting: LMCache names the model'),
        ({**URL, "threads": 0}, '"threads" must be at least 1'),
        ({**URL, "threads": 2.5}, '"threads" must be a whole number'),
        ({**URL, "lock_s": 0}, '"lock_s" must be a positive number of seconds'),
        ({**URL, "transport": "pigeon"}, "\"transport\" is 'pigeon'"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConnectorRefused) as refused:
        L2Settings.of(wrong)
    assert told in str(refused.value)
    assert str(refused.value).startswith('"adapter_params" in --l2-adapter: ')
