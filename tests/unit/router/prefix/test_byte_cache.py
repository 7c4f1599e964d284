"""A cache that is bounded by bytes, against a plain model of it."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.prefix.hash_cache import ByteCache

BOUND, LARGEST = 100, 40
keys = st.integers(0, 6)
steps = st.lists(st.tuples(keys, st.none() | st.integers(1, 50)), max_size=60)


@given(steps)
def test_it_keeps_what_was_used_last_within_its_bound(asked: list[tuple[int, int | None]]) -> None:
    """A size puts an entry, None looks it up."""
    cache: ByteCache[int, int] = ByteCache(BOUND, LARGEST, lambda _, size: size)
    model: dict[int, int] = {}
    for key, size in asked:
        if size is None:
            assert cache.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        else:
            cache.put(key, size)
            if size <= LARGEST:
                model.pop(key, None)
                model[key] = size
                while sum(model.values()) > BOUND:
                    del model[next(iter(model))]
        assert cache.use == (len(model), sum(model.values()), BOUND)


def test_an_entry_that_is_too_large_leaves_the_others() -> None:
    cache: ByteCache[str, int] = ByteCache(BOUND, LARGEST, lambda _, size: size)
    cache.put("small", 10)
    cache.put("large", LARGEST + 1)
    assert cache.get("large") is None
    assert cache.get("small") == 10
