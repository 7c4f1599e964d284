"""Which models the router knows, as engines come, change what they serve, and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.models import ModelNames
from kvrouter.engines.pool import EnginePool
from kvrouter.errors import ApiError
from kvrouter.openai.endpoints import COMPLETIONS

KEEP_S = 300.0


class Fleet:
    """A pool that reports its engines to `ModelNames`, and a clock that the test moves."""

    def __init__(self, only: str | None = None) -> None:
        self.now_s = 0.0
        self.pool = EnginePool(lambda: self.now_s)
        self.names = ModelNames(only, KEEP_S, lambda: self.now_s)
        self.pool.on_join(self.names.engine_joined)
        self.pool.on_leave(self.names.engine_left)
        self.pool.on_models_change(self.names.engine_joined)

    def engine(self, number: int) -> Engine:
        return self.pool.add(f"127.0.0.1:{8000 + number}", Role.DECODE)

    def serve(self, number: int, *models: str) -> None:
        """The engine joins with these models, or names them from now on."""
        engine, identity = self.engine(number), Identity(models)
        if engine.identity is None:
            self.pool.join(engine, identity)
        else:
            self.pool.update_models(engine, identity)

    def serves(self, path: str) -> int:
        """The status for a model that is served; 200 where it is routed."""
        try:
            self.names.require("a", path)
        except ApiError as error:
            return error.status
        return 200

    def leave(self, number: int) -> None:
        self.pool.leave(self.engine(number))

    def status(self, model: str | None) -> int:
        """Of the answer to a request for `model`; 200 where it is routed."""
        try:
            self.names.resolve(model, COMPLETIONS)
        except ApiError as error:
            return error.status
        return 200


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_model_is_forgotten_some_time_after_its_last_engine_left(fleet: Fleet) -> None:
    fleet.serve(0, "a")
    fleet.serve(1, "b")
    fleet.leave(0)
    fleet.now_s = KEEP_S - 1
    assert fleet.status("a") == 200
    fleet.now_s = KEEP_S
    assert fleet.status("a") == 404
    assert fleet.status("b") == 200


def test_an_engine_that_comes_back_in_time_keeps_its_models_known(fleet: Fleet) -> None:
    fleet.serve(0, "a")
    fleet.serve(1, "b")
    fleet.leave(0)
    fleet.now_s = KEEP_S / 2
    fleet.serve(0, "a")
    fleet.now_s = 10 * KEEP_S
    assert fleet.status("a") == 200


def test_a_model_that_another_engine_serves_outlives_the_one_that_left(fleet: Fleet) -> None:
    fleet.serve(0, "a")
    fleet.serve(1, "a", "b")
    fleet.leave(0)
    fleet.now_s = 10 * KEEP_S
    assert fleet.status("a") == 200


def test_an_adapter_is_known_when_its_engine_has_loaded_it(fleet: Fleet) -> None:
    fleet.serve(0, "a")
    assert fleet.status("lora") == 404
    fleet.serve(0, "a", "lora")
    assert fleet.status("lora") == 200


def test_an_adapter_is_forgotten_at_once_when_no_engine_names_it_any_more(fleet: Fleet) -> None:
    fleet.serve(0, "a", "lora")
    fleet.serve(1, "a", "lora")
    fleet.serve(0, "a")
    assert fleet.status("lora") == 200
    fleet.serve(1, "a")
    assert fleet.status("lora") == 404


def test_a_router_that_has_forgotten_every_model_answers_503_as_at_its_start(fleet: Fleet) -> None:
    assert fleet.status("a") == 503
    fleet.serve(0, "a")
    fleet.leave(0)
    fleet.now_s = KEEP_S
    assert fleet.status("a") == 503
    assert not fleet.names.any


def test_the_one_model_that_is_named_by_flag_is_never_forgotten() -> None:
    fleet = Fleet(only="a")
    fleet.serve(0, "a")
    fleet.leave(0)
    fleet.now_s = 10 * KEEP_S
    assert fleet.status("a") == 200
    assert fleet.status("b") == 404


def test_a_request_that_names_no_model_means_the_only_one_that_is_known(fleet: Fleet) -> None:
    fleet.serve(0, "a")
    fleet.serve(1, "b")
    assert fleet.status(None) == 400
    fleet.leave(1)
    fleet.now_s = KEEP_S
    assert fleet.names.resolve(None, COMPLETIONS) == "a"


def test_without_a_name_the_first_is_meant_if_engines_agree_on_it(fleet: Fleet) -> None:
    fleet.serve(1, "a", "also", "adapter")
    fleet.serve(2, "a", "other adapter")
    assert fleet.names.resolve(None, COMPLETIONS) == "a"
    fleet.serve(3, "b")
    assert fleet.status(None) == 400


def test_an_endpoint_that_no_engine_of_the_model_has_is_a_404(fleet: Fleet) -> None:
    fleet.pool.join(fleet.engine(0), Identity(("a",), endpoints=frozenset((COMPLETIONS,))))
    fleet.pool.join(fleet.engine(1), Identity(("e",), generates=False))
    fleet.names.require("a", COMPLETIONS)
    fleet.names.require("e", "/v1/embeddings")
    for model, path in (("a", "/v1/embeddings"), ("e", COMPLETIONS)):
        with pytest.raises(ApiError) as refused:
            fleet.names.require(model, path)
        assert (refused.value.status, refused.value.code) == (404, "endpoint_not_served")
        assert path in refused.value.message


def test_an_endpoint_is_known_while_the_engine_that_has_it_may_come_back(fleet: Fleet) -> None:
    fleet.pool.join(fleet.engine(0), Identity(("a",)))
    fleet.pool.join(fleet.engine(1), Identity(("a",), generates=False))
    fleet.leave(0)
    fleet.names.require("a", COMPLETIONS)
    fleet.now_s = KEEP_S
    with pytest.raises(ApiError):
        fleet.names.require("a", COMPLETIONS)


def test_a_request_that_names_no_model_means_the_only_one_with_the_endpoint(fleet: Fleet) -> None:
    fleet.pool.join(fleet.engine(0), Identity(("a",), endpoints=frozenset((COMPLETIONS,))))
    fleet.pool.join(fleet.engine(1), Identity(("e",), generates=False))
    assert fleet.names.resolve(None, COMPLETIONS) == "a"
    assert fleet.names.resolve(None, "/v1/embeddings") == "e"
    fleet.pool.update_models(
        fleet.engine(1), Identity(("e",), generates=False, endpoints=frozenset())
    )
    with pytest.raises(ApiError) as refused:
        fleet.names.resolve(None, "/v1/embeddings")
    assert refused.value.status == 404


MODELS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.integers(0, 2), MODELS),
        st.tuples(st.just("leave"), st.integers(0, 2), st.just([])),
        st.tuples(st.just("wait"), st.integers(1, 400), st.just([])),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_model_is_known_by_the_engines_that_serve_it_and_those_that_left_lately(
    steps: list[tuple[str, int, list[str]]],
) -> None:
    fleet = Fleet()
    serving: dict[int, list[str]] = {}
    left: dict[int, tuple[float, list[str]]] = {}
    for what, number, models in steps:
        if what == "serve":
            fleet.serve(number, *models)
            serving[number] = models
            left.pop(number, None)
        elif what == "leave":
            fleet.leave(number)
            if number in serving:
                left[number] = fleet.now_s, serving.pop(number)
        else:
            fleet.now_s += number
        lately = [had for at, had in left.values() if fleet.now_s - at < KEEP_S]
        known = {model for model in "abcd" if fleet.status(model) == 200}
        assert known == set().union(*serving.values(), *lately)


def test_what_only_prefill_engines_list_is_not_served(fleet: Fleet) -> None:
    engine = fleet.pool.add("127.0.0.1:9000", Role.PREFILL)
    fleet.pool.join(engine, Identity(("a",), endpoints=frozenset({COMPLETIONS, "/v1/embeddings"})))
    assert fleet.serves("/v1/embeddings") == 200  # a decode engine may still join that has it
    decode = Identity(("a",), endpoints=frozenset({COMPLETIONS}))
    fleet.pool.join(fleet.engine(0), decode)
    assert (fleet.serves(COMPLETIONS), fleet.serves("/v1/embeddings")) == (200, 404)
    fleet.leave(0)
    assert fleet.serves("/v1/embeddings") == 404  # it may only restart
    fleet.pool.assign("127.0.0.1:9000", Role.DECODE)
    assert fleet.serves("/v1/embeddings") == 200
