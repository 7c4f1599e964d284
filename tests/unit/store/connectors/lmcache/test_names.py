"""Objects of LMCache get the same manifest and name in every process, and others differ."""

from dataclasses import replace

import pytest
from tests.unit.store.connectors.lmcache.keys import BFLOAT16, FLOAT16, Key, chunk

from kvrouter_store.connectors.lmcache.names import Manifests, ObjectLayout, layout_of, name_of
from kvrouter_store.identity.blob import blob_manifest

KEY = Key(chunk(0))
LAYOUT = layout_of([(2, 4, 16, 8)], [FLOAT16])


def identity(key: Key, layout: ObjectLayout = LAYOUT, revision: str = "") -> tuple[bytes, bytes]:
    manifest = Manifests(revision).of(key, layout)
    return manifest.digest, name_of(key)


def test_an_object_has_the_size_of_its_tensors() -> None:
    assert LAYOUT.size_bytes == 2 * 4 * 16 * 8 * 2
    assert layout_of([(2, 3), (5,)], [FLOAT16, BFLOAT16]).size_bytes == 12 + 10
    assert Manifests().of(KEY, LAYOUT).block_bytes == LAYOUT.size_bytes


def test_two_servers_give_an_object_one_identity() -> None:
    assert identity(KEY) == identity(replace(KEY))


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, chunk_hash=chunk(1)),
        replace(KEY, model_name="models/other"),
        replace(KEY, kv_rank=0x02010201),
        replace(KEY, object_group_id=1),
        replace(KEY, cache_salt="alice"),
    ],
)
def test_objects_that_differ_in_any_part_of_their_key_are_never_taken_for_each_other(
    other: Key,
) -> None:
    assert identity(other) != identity(KEY)


def test_salt_and_chunk_are_told_apart() -> None:
    assert name_of(Key(b"\xab", cache_salt="")) != name_of(Key(b"", cache_salt="ab"))


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        ([(2, 4, 16, 8)], [BFLOAT16]),  # as many bytes
        ([(4, 2, 16, 8)], [FLOAT16]),
        ([(2, 4, 8, 8), (2, 4, 8, 8)], [FLOAT16, FLOAT16]),
    ],
)
def test_bytes_in_another_order_are_another_object(
    shapes: list[tuple[int, ...]], dtypes: list[object]
) -> None:
    assert identity(KEY, layout_of(shapes, dtypes)) != identity(KEY)


def test_servers_share_only_under_one_revision_of_the_weights() -> None:
    assert identity(KEY, revision="r1") == identity(KEY, revision="r1")
    assert identity(KEY, revision="r1") != identity(KEY, revision="r2")


def test_where_an_object_may_be_is_learnt_from_what_a_store_lists() -> None:
    theirs, ours = Manifests("r1"), Manifests("r1")
    theirs_of_key = theirs.of(KEY, LAYOUT)
    foreign = [
        blob_manifest("another", KEY.model_name, 64, {}),
        blob_manifest("lmcache", KEY.model_name, 64, {"kv_rank": "0"}),
        Manifests("r2").of(KEY, LAYOUT),
    ]
    assert ours.all_of(KEY) == []
    ours.learn([*foreign, theirs_of_key])
    assert ours.all_of(KEY) == [theirs_of_key]
    assert ours.all_of(replace(KEY, kv_rank=7)) == []
