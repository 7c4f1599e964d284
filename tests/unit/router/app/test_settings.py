"""The router's own settings: its engines, and the nodes of its store."""

from typing import Any

import pytest

from kvrouter.app.settings import RouterSettings
from kvrouter.cli.main import main
from kvrouter.options.complaints import UsageError
from kvrouter.options.load import load


def test_numbers_are_given_for_all_engines_or_for_one() -> None:
    settings = RouterSettings(
        decode=["a:1"], data_parallel_size=["8", "http://b:2=4"], bootstrap_port=["[::1]:3=99"]
    )
    assert settings.rank_counts == {"": 8, "b:2": 4}
    assert settings.bootstrap_ports == {"[::1]:3": 99}


def test_numbers_are_given_by_model_in_yaml_as_a_mapping_too() -> None:
    given = {
        "decode": ["a:1"],
        "model_max_concurrent_requests": {"org/m:8b": 9},
        "model_prefill_threshold": "a=0 b=1,c=2",
    }
    settings = load(RouterSettings, given).settings
    assert settings.model_limits == {"org/m:8b": 9}
    assert settings.model_thresholds == {"a": 0, "b": 1, "c": 2}
    for wrong in ("9", "=9", "m=0", "m=x", "m=-1"):
        with pytest.raises(UsageError, match="give it as NAME=COUNT, with at least 1"):
            load(RouterSettings, {"decode": ["a:1"], "model_max_concurrent_requests": [wrong]})


@pytest.mark.parametrize(
    "given",
    [
        ["kv://a:1", "kvs://b:2"],
        ["kv://A:1/", "kv://a:1", "kvs://b:2"],
        "kv://a:1,kvs://b:2",
        "kv://a:1 kvs://b:2",
    ],
)
def test_nodes_of_the_store_are_a_list_each_in_its_one_form(given: Any) -> None:
    settings = load(RouterSettings, {"decode": ["a:1"], "store": given}).settings
    assert settings.store == ["kv://a:1", "kvs://b:2"]


def test_commas_part_store_nodes_at_sockets_too() -> None:
    given = "kv+unix:///a,kv+unix:///b kv://h:1"
    settings = RouterSettings(decode=["d:1"], store=given)  # type: ignore[arg-type]
    assert settings.store == ["kv+unix:///a", "kv+unix:///b", "kv://h:1"]


@pytest.mark.parametrize("given", ["mooncake://m:1?groups=0,3,", ["mooncake://m:1?groups=0,3"]])
def test_a_comma_within_a_url_is_kept(given: Any) -> None:
    settings = load(RouterSettings, {"decode": ["a:1"], "store": given}).settings
    assert settings.store == ["mooncake://m:1?groups=0,3"]
    assert settings.store_nodes == []


@pytest.mark.parametrize("given", [None, "", []])
def test_without_a_node_there_is_no_store(given: Any) -> None:
    assert load(RouterSettings, {"decode": ["a:1"], "store": given}).settings.store == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"store_events_connect": ["1"], "store_events_replay": ["2"]}, "needs store nodes"),
        (
            {"store": "lmcache://a:1", "store_events_connect": ["1"], "store_events_replay": ["2"]},
            "needs store nodes",
        ),
        ({"store": "kv://a:1", "store_events_replay": ["2"]}, "only with --store-events-connect"),
        ({"store": "kv://a:1", "store_events_connect": ["1"]}, "give --store-events-replay"),
        (
            {"store": "kv://a:1", "store_events_connect": ["1"], "store_events_replay": ["1"]},
            "--store-events-connect 1 needs",
        ),
        (
            {"store": "kv://a:1", "store_events_connect": ["1"], "store_events_replay": ["b:1=2"]},
            "give --store-events-replay",
        ),
    ],
)
def test_events_of_nodes_need_nodes_and_the_port_of_their_replays(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load(RouterSettings, {"decode": ["a:1"], **given})


def test_a_member_that_is_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--kv-events-config", '{"endpiont": "tcp://127.0.0.1:1"}']) == 2
    told = "--kv-events-config: 'endpiont': there is no such member; correct its name"
    assert told in capsys.readouterr().err
