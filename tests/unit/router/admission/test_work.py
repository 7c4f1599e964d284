import json
from typing import Any

import pytest

from kvrouter.admission.queue import Work, work_of
from kvrouter.openai.request import OPEN_ENDED_TOKENS, parse

IDS = list(range(1, 9))


def work(**body: Any) -> Work:
    return work_of(parse(json.dumps({"prompt": IDS, **body}).encode(), "completion", 64))


def test_a_request_weighs_its_prompt_and_the_answer_that_it_allows() -> None:
    assert work(max_tokens=5) == Work(8, 5)


@pytest.mark.parametrize("samples", [1, 3])
def test_every_sample_weighs_as_much_as_a_request_of_its_own(samples: int) -> None:
    assert work(n=samples, max_tokens=5) == Work(8 * samples, 5 * samples)


def test_every_prompt_has_an_answer() -> None:
    two = work(prompt=["a" * 40, "a" * 40], n=3, max_tokens=5)
    assert two.answer_tokens == 2 * 3 * 5
    assert two.prompt_tokens == pytest.approx(2 * 3 * 10, rel=0.2)


def test_an_answer_without_a_limit_and_one_with_a_high_limit_weigh_the_same() -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}]%b}'
    found = [work_of(parse(body % more, "chat", 1)) for more in (b"", b', "max_tokens": 32000')]
    assert [each.answer_tokens for each in found] == [OPEN_ENDED_TOKENS] * 2
