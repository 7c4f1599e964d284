"""A request with the name of another model in its body."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.request import parse
from kvrouter.serving.request.versions import renamed

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    NAMES,
    NAMES,
    st.one_of(NAMES.filter(bool), st.lists(NAMES.filter(bool), min_size=1, max_size=3)),
    st.permutations(["model", "prompt", "max_tokens", "seed"]),
    st.sampled_from([0, orjson.OPT_INDENT_2]),
)
def test_a_renamed_request_is_that_which_names_the_other_model(
    asked: str, model: str, prompt: str | list[str], order: list[str], form: int
) -> None:
    members = {"model": asked, "prompt": prompt, "max_tokens": 3, "seed": 1}
    body = orjson.dumps({name: members[name] for name in order}, option=form)
    found = renamed(parse(body, "completion", 9), model)
    expected = parse(found.body, "completion", 9)
    assert orjson.loads(found.body) == {**members, "model": model}
    assert (found.spans, found.prompts) == (expected.spans, expected.prompts)
    assert (found.model, expected.model) == (asked, model)
    assert found.prompt_tokens == expected.prompt_tokens


@given(NAMES, st.sampled_from([0, orjson.OPT_INDENT_2]))
def test_a_request_without_a_model_gets_one(model: str, form: int) -> None:
    members = {"prompt": ["a", "b"], "max_tokens": 3}
    found = renamed(parse(orjson.dumps(members, option=form), "completion", 9), model)
    expected = parse(found.body, "completion", 9)
    assert orjson.loads(found.body) == {"model": model, **members}
    assert (found.spans, found.prompts) == (expected.spans, expected.prompts)
