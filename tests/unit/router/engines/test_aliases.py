"""Aliases of models, as they are written in flags, in the environment and in YAML."""

from pathlib import Path
from typing import Any

import pytest

from kvrouter.app.settings import RouterSettings
from kvrouter.cli.main import main
from kvrouter.options.complaints import UsageError
from kvrouter.options.load import load


def aliases(given: Any) -> dict[str, dict[str, float]]:
    settings = load(RouterSettings, {"decode": ["a:1"], "model_alias": given}).settings
    return {alias: dict(versions) for alias, versions in settings.aliases.items()}


def test_an_alias_stands_for_one_model() -> None:
    assert aliases(["chat=org/llama-3.1:8b"]) == {"chat": {"org/llama-3.1:8b": 1}}


def test_an_alias_shares_sessions_between_models_by_weight() -> None:
    assert aliases(["chat=llama-a:90,llama-b:10"]) == {"chat": {"llama-a": 90, "llama-b": 10}}
    assert aliases(["chat=a:8b:0.5,b:70b:1.5"]) == {"chat": {"a:8b": 0.5, "b:70b": 1.5}}


def test_models_without_weights_have_equal_ones() -> None:
    assert aliases(["chat=a,b:8b"]) == {"chat": {"a": 1, "b:8b": 1}}


def test_a_model_of_weight_0_gets_nothing() -> None:
    assert aliases(["chat=a:100,b:0"]) == {"chat": {"a": 100}}


def test_an_alias_may_be_the_name_of_one_of_its_models() -> None:
    assert aliases(["a=a:9,b:1"]) == {"a": {"a": 9, "b": 1}}


def test_the_environment_separates_aliases_by_blanks() -> None:
    assert aliases("x=a:9,b:1 y=a") == {"x": {"a": 9, "b": 1}, "y": {"a": 1}}


def test_a_number_at_the_end_of_a_name_is_written_with_a_weight_after_it() -> None:
    assert aliases(["chat=gemma:2:1"]) == {"chat": {"gemma:2": 1}}
    assert aliases(["chat=gemma:2:9,gemma:3:1"]) == {"chat": {"gemma:2": 9, "gemma:3": 1}}


def test_yaml_has_mappings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "decode: [a:1]\nmodel-alias:\n  gpt: llama:8b\n  chat: {gemma:2: 90, gemma:3: 10}\n"
    )
    loaded = load(RouterSettings, {}, str(file)).settings
    assert loaded.aliases == {"gpt": {"llama:8b": 1}, "chat": {"gemma:2": 90, "gemma:3": 10}}
    assert main(["config", "check", str(file)]) == 0
    capsys.readouterr()


def test_a_list_of_yaml_has_equal_shares() -> None:
    assert aliases({"chat": ["a", "b"]}) == aliases(["chat=a,b"])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("chat", "give it as NAME=MODEL or NAME=MODEL:WEIGHT,MODEL:WEIGHT"),
        ("=a", "give it as"),
        ("chat=a,", "give it as"),
        (
            "chat=gemma:2",
            "chat=gemma:2 is not clear: write chat=gemma for the model 'gemma', or "
            "chat=gemma:2:1 for the model 'gemma:2'",
        ),
        ("chat=a:9,b", "'b' has no weight, others have; give all of them one"),
        ("chat=a:9,a:1", "'a' occurs twice; give it one weight"),
        ("chat=a:0,b:0", "all weights are 0; give one model a higher one"),
        ("x=a y=x", "'y' stands for 'x', an alias too; name its models"),
        ("x=a x=b", "the alias 'x' occurs twice; give all its models at once"),
        ({"chat": {"a": True}}, "'a': True is no weight"),
        ({"chat": None}, "None is no model; give a name, or a mapping of names to weights"),
        ({"chat": ["a", 1]}, "['a', 1] is no model"),
        ({"chat": {"a": -1}}, "'a': -1 is no weight; give a number, as 90 or 0.5"),
    ],
)
def test_what_is_not_clear_is_wrong_use(given: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        aliases(given)
    assert str(refused.value).startswith("--model-alias: ")
    assert sentence in str(refused.value)


def test_a_command_with_an_alias_that_is_not_clear_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--decode", "a:1", "--model-alias", "chat=gemma:2"]) == 2
    assert "chat=gemma:2:1" in capsys.readouterr().err
