"""The simulated engine keeps vLLM's rules: the same cases are held against real engines."""

import json
from collections.abc import Iterator

import pytest
from tests.fakes import openai_cases as cases
from tests.tools.sim.conftest import LiveSim

from kvrouter.tools.sim.settings import SimSettings

MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def sim() -> Iterator[LiveSim]:
    settings = SimSettings(model="tiny", port=0, block_size=16, max_model_len=MAX_MODEL_LEN)
    with LiveSim(settings) as live:
        yield live


@pytest.mark.parametrize("case", cases.refusals(MAX_MODEL_LEN), ids=lambda case: case.name)
def test_it_refuses_as_vllm_does(sim: LiveSim, case: cases.Refusal) -> None:
    cases.check_refusal(sim.ask, "tiny", case)


@pytest.mark.parametrize("case", cases.ACCEPTED, ids=lambda case: case.name)
def test_it_answers_as_vllm_does(sim: LiveSim, case: cases.Accepted) -> None:
    cases.check_accepted(sim.ask, "tiny", case)


@pytest.mark.parametrize("path", [cases.COMPLETIONS, cases.CHAT])
def test_a_stream_says_what_the_whole_answer_says(sim: LiveSim, path: str) -> None:
    cases.check_stream(sim.ask, "tiny", path)


def test_a_stream_has_usage_only_when_asked(sim: LiveSim) -> None:
    cases.check_usage_only_when_asked(sim.ask, "tiny")


def test_tokenize_gives_the_ids_that_answers_have(sim: LiveSim) -> None:
    cases.check_tokenize(sim.ask, "tiny")


def test_health_version_models_and_metrics_are_there(sim: LiveSim) -> None:
    cases.check_endpoints(sim.ask, "tiny")


def test_an_answer_stops_at_the_end_of_the_context(sim: LiveSim) -> None:
    answer = sim.complete([7] * (MAX_MODEL_LEN - 3), max_tokens=50)
    assert answer["usage"]["completion_tokens"] == 3


def test_a_chat_without_a_count_stops_by_itself(sim: LiveSim) -> None:
    body = json.dumps({"messages": cases.MESSAGES}).encode()
    answer = json.loads(sim.ask("POST", cases.CHAT, body)[1])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert 0 < answer["usage"]["completion_tokens"] < MAX_MODEL_LEN


def test_continuous_usage_counts_up(sim: LiveSim) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 3, "stream": True, "stream_options": options}
    _, answer = sim.ask("POST", cases.COMPLETIONS, json.dumps(body).encode())
    counted = [event["usage"]["completion_tokens"] for event in cases.events(answer)]
    assert counted == [1, 2, 3, 3]


@pytest.mark.parametrize("path", [cases.COMPLETIONS, cases.CHAT])
def test_choices_are_numbered_and_seeded_as_vllm_does(sim: LiveSim, path: str) -> None:
    cases.check_choices(sim.ask, "tiny", path)


def test_each_choice_of_a_stream_counts_its_own_usage(sim: LiveSim) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["hi", "hello"], "max_tokens": 2, "stream": True, "stream_options": options}
    *others, last = cases.events(sim.ask("POST", cases.COMPLETIONS, json.dumps(body).encode())[1])
    for index, prompt_tokens in enumerate((1, 3)):
        usages = [e["usage"] for e in others if e["choices"][0]["index"] == index]
        assert [u["completion_tokens"] for u in usages] == [1, 2]
        assert {u["prompt_tokens"] for u in usages} == {prompt_tokens}
    assert last["usage"]["total_tokens"] == 8


@pytest.mark.parametrize("name", ["echo", "use_beam_search", "logprobs"])
def test_what_it_cannot_do_is_refused_and_not_answered_otherwise(sim: LiveSim, name: str) -> None:
    body = {"prompt": "hello", name: 1 if name == "logprobs" else True}
    status, answer = sim.ask("POST", cases.COMPLETIONS, json.dumps(body).encode())
    assert status == 400
    assert "simulator" in json.loads(answer)["error"]["message"]
