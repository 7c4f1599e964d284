"""LMCache hears of what this server stored, and of what has left the store since, in that order."""

import threading
from collections.abc import Sequence

from tests.unit.store.connectors.lmcache.keys import FLOAT16, Key, chunk

from kvrouter_store.connectors.lmcache.announced import Announced
from kvrouter_store.connectors.lmcache.names import Manifests, ObjectKey, layout_of

BYTES = 4096
MANIFEST = Manifests().of(Key(chunk(0)), layout_of([(BYTES // 2,)], [FLOAT16]))


def keys(*numbers: int, salt: str = "") -> list[ObjectKey]:
    return [Key(chunk(number), cache_salt=salt) for number in numbers]


class LMCache:
    """What it heard, as (whether stored, keys); every size must be that of an object, or 0."""

    def __init__(self, most: int = 100) -> None:
        self.heard: list[tuple[bool, list[ObjectKey]]] = []
        self.sizes: set[int] = set()
        self.announced = Announced(self.on_stored, self.on_deleted, most)

    def on_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.heard.append((True, keys))
        self.sizes.update(sizes)

    def on_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.heard.append((False, keys))
        self.sizes.update(sizes)

    def store(self, keys: Sequence[ObjectKey]) -> None:
        self.announced.stored(keys, [MANIFEST] * len(keys))

    def check(self, keys: Sequence[ObjectKey], there: Sequence[bool]) -> None:
        last = zip(keys, self.announced.of(keys), strict=True)
        self.announced.checked({key: told for key, told in last if told}, there)


def test_lmcache_hears_once_of_an_object_that_left_the_store() -> None:
    lmcache = LMCache()
    lmcache.store(keys(1, 2, 3))
    lmcache.check(keys(1, 2, 3), [True, False, True])
    lmcache.check(keys(1, 2, 3), [True, False, True])
    assert lmcache.heard == [(True, keys(1, 2, 3)), (False, keys(2))]
    assert lmcache.sizes == {BYTES}
    assert lmcache.announced.bytes_by_salt() == {"": 2 * BYTES}


def test_lmcache_hears_of_an_object_that_is_there_again_though_another_stored_it() -> None:
    lmcache = LMCache()
    lmcache.store(keys(1))
    lmcache.check(keys(1), [False])
    assert lmcache.announced.bytes_by_salt() == {}
    lmcache.check(keys(1), [True])
    assert lmcache.heard[2:] == [(True, keys(1))]
    assert lmcache.announced.bytes_by_salt() == {"": BYTES}


def test_an_object_that_is_stored_again_counts_once_and_is_told_again() -> None:
    lmcache = LMCache()
    for _ in range(3):
        lmcache.store(keys(1, 2, salt="alice"))
    assert lmcache.heard == [(True, keys(1, 2, salt="alice"))] * 3
    assert lmcache.announced.bytes_by_salt() == {"alice": 2 * BYTES}


def test_an_object_stored_after_the_store_was_asked_is_not_told_as_gone() -> None:
    lmcache = LMCache()
    lmcache.store(keys(1))
    seen = lmcache.announced.next(10)
    lmcache.store(keys(1))  # the store had answered before
    lmcache.announced.checked(seen, [False])
    lmcache.announced.deleted(dict(seen))
    assert lmcache.heard == [(True, keys(1))] * 2
    assert lmcache.announced.bytes_by_salt() == {"": BYTES}


def test_a_store_is_told_after_the_deletion_before_it() -> None:
    lmcache = LMCache()
    lmcache.store(keys(1))
    storing = threading.Thread(target=lmcache.store, args=[keys(1)])

    def slow(keys: list[ObjectKey], sizes: list[int]) -> None:
        storing.start()
        storing.join(0.1)  # it waits, and ends when this was told
        assert lmcache.announced.bytes_by_salt() in ({}, {"": BYTES})  # who asks does not wait
        lmcache.on_deleted(keys, sizes)

    lmcache.announced._deleted = slow
    lmcache.check(keys(1), [False])
    storing.join(10)
    assert lmcache.heard == [(True, keys(1)), (False, keys(1)), (True, keys(1))]
    assert lmcache.announced.bytes_by_salt() == {"": BYTES}


def test_a_listener_may_delete_an_object_while_it_is_told_of_it() -> None:
    lmcache = LMCache()

    def delete(keys: list[ObjectKey], sizes: list[int]) -> None:
        lmcache.announced.deleted(dict(zip(keys, lmcache.announced.of(keys), strict=True)))

    lmcache.announced._stored = delete
    lmcache.store(keys(1))
    assert lmcache.heard == [(False, keys(1))]
    assert lmcache.announced.bytes_by_salt() == {}


def test_a_deleted_object_is_uncounted_and_one_of_another_server_is_told_without_a_size() -> None:
    lmcache = LMCache()
    lmcache.store(keys(1, 2))
    seen = dict(zip(keys(1, 7), lmcache.announced.of(keys(1, 7)), strict=True))
    lmcache.announced.deleted(seen)
    assert lmcache.heard[1:] == [(False, keys(1, 7))]
    assert lmcache.sizes == {BYTES, 0}
    assert lmcache.announced.bytes_by_salt() == {"": BYTES}
    assert list(lmcache.announced.next(10)) == keys(2)


def test_objects_take_turns_at_being_checked() -> None:
    lmcache = LMCache()
    lmcache.store(keys(1, 2, 3))
    turns = [list(lmcache.announced.next(2)) for _ in range(3)]
    assert turns == [keys(1, 2), keys(3, 1), keys(2, 3)]


def test_of_too_many_objects_the_one_told_of_or_checked_longest_ago_is_forgotten() -> None:
    lmcache = LMCache(most=3)
    lmcache.store(keys(1, 2, 3))
    lmcache.announced.next(1)
    lmcache.store(keys(4, salt="bob"))
    assert list(lmcache.announced.next(10)) == [*keys(3, 1), *keys(4, salt="bob")]
    assert lmcache.announced.bytes_by_salt() == {"": 2 * BYTES, "bob": BYTES}
    assert [kept for kept, _ in lmcache.heard] == [True, True]
