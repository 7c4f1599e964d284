import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.store import chain_of, manifest_of

from kvrouter_store.errors import BadDocument
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import BlockHashes, hash_tokens, root_hash
from kvrouter_store.identity.layout import Layout

names = st.text(min_size=0, max_size=12)
layouts = st.builds(
    Layout.opaque,
    engine=names,
    fields=st.dictionaries(names, st.one_of(names, st.integers(0, 99), st.booleans(), st.none())),
)
specs = st.builds(
    CacheSpec,
    model=names,
    weights_revision=names,
    kv_dtype=names,
    block_tokens=st.integers(1, 512),
    hash_algo=names,
    root=st.binary(min_size=32, max_size=32).map(bytes.hex),
    groups=st.lists(names, min_size=1, max_size=3).map(tuple),
    adapters=st.lists(names, max_size=3).map(tuple),
)
ranges = st.tuples(st.integers(0, 64), st.integers(1, 64)).map(lambda r: (r[0], r[0] + r[1]))
parts = st.builds(
    Part,
    layers=ranges,
    kv_heads=ranges,
    group=st.just(0),
    block_bytes=st.integers(1, 1 << 40),
    layout=layouts,
)
manifests = st.builds(
    Manifest,
    spec=specs,
    parts=st.lists(parts, min_size=1, max_size=4, unique_by=lambda part: part.digest).map(tuple),
)


@given(manifests)
def test_a_manifest_is_read_back_from_its_document(manifest: Manifest) -> None:
    again = Manifest.from_doc(manifest.doc)
    assert again == manifest
    assert again.digest == manifest.digest == hashlib.sha256(manifest.doc).digest()


@given(specs, st.sampled_from([field.name for field in dataclasses.fields(CacheSpec)]))
def test_any_field_makes_another_cache_spec(spec: CacheSpec, field: str) -> None:
    value = getattr(spec, field)
    other: object
    if field == "root":
        other = ("00" if value[:2] != "00" else "11") + value[2:]
    elif isinstance(value, int):
        other = value + 1
    else:
        other = (*value, "x") if isinstance(value, tuple) else value + "x"
    changed: dict[str, Any] = {field: other}
    assert dataclasses.replace(spec, **changed).digest != spec.digest


def test_the_order_of_layout_fields_does_not_matter() -> None:
    one = Layout.opaque("e", {"a": 1, "b": 2})
    assert one == Layout.opaque("e", {"b": 2, "a": 1})


@given(
    st.one_of(st.binary(max_size=200), st.recursive(st.none(), st.lists).map(str).map(str.encode))
)
def test_what_is_no_manifest_is_refused(doc: bytes) -> None:
    with pytest.raises(BadDocument):
        Manifest.from_doc(doc)


@given(manifests, st.data())
def test_a_manifest_that_lacks_something_is_refused(
    manifest: Manifest, data: st.DataObject
) -> None:
    tree = json.loads(manifest.doc)
    branch = data.draw(st.sampled_from([tree, tree["spec"], tree["parts"][0]]))
    del branch[data.draw(st.sampled_from(sorted(branch)))]
    with pytest.raises(BadDocument):
        Manifest.from_doc(json.dumps(tree).encode())


def test_a_manifest_of_a_later_version_is_refused() -> None:
    tree = json.loads(manifest_of().doc) | {"version": 2}
    with pytest.raises(BadDocument, match="version 2"):
        Manifest.from_doc(json.dumps(tree).encode())


def test_identities_that_make_no_sense_are_refused() -> None:
    spec, part = manifest_of().spec, manifest_of().parts[0]
    with pytest.raises(BadDocument, match="64 hex digits"):
        dataclasses.replace(spec, root="00")
    with pytest.raises(BadDocument, match="block_tokens"):
        dataclasses.replace(spec, block_tokens=0)
    with pytest.raises(BadDocument, match="cache group"):
        dataclasses.replace(spec, groups=())
    with pytest.raises(BadDocument, match="first < end"):
        dataclasses.replace(part, layers=(3, 3))
    with pytest.raises(BadDocument, match="same"):
        Manifest(spec, (part, part))
    with pytest.raises(BadDocument, match="does not have"):
        Manifest(spec, (dataclasses.replace(part, group=1),))


def test_a_block_is_as_large_as_its_parts() -> None:
    assert manifest_of(512, parts=3).block_bytes == 1536


def test_hashes_are_those_of_vllm() -> None:
    root = root_hash()
    assert root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    plain = hash_tokens([1, 2, 3, 4], 4, root=root)
    assert plain.data.hex() == "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"
    salted = hash_tokens([1, 2, 3, 4], 4, root=root, cache_salt="t")
    assert salted.data.hex() == "a0ac52c648ce50bf95a7eb762effceb7eef511000dfa6489d36dafc24e82c782"


def test_a_partial_last_block_has_no_name() -> None:
    root = root_hash()
    assert len(hash_tokens([1, 2, 3], 4, root=root)) == 0
    assert hash_tokens([1, 2, 3, 4, 5], 4, root=root) == hash_tokens([1, 2, 3, 4], 4, root=root)


def test_a_chain_can_be_continued() -> None:
    root = root_hash()
    whole = hash_tokens(list(range(12)), 4, root=root)
    rest = hash_tokens(list(range(4, 12)), 4, root=root, parent=whole[0])
    assert whole[1:] == rest


def test_block_hashes_behave_as_a_sequence() -> None:
    hashes = BlockHashes(chain_of(3))
    assert len(hashes) == 3
    assert list(hashes) == [hashes[0], hashes[1], hashes[2]]
    assert hashes[-1] == hashes.data[64:]
    assert hashes[:2].data == hashes.data[:64]
    assert hashes.low64()[2] == int.from_bytes(hashes.data[-8:], "big")
    with pytest.raises(IndexError):
        hashes[3]
    with pytest.raises(ValueError, match="whole number"):
        BlockHashes(b"123")
    with pytest.raises(ValueError, match="step 1"):
        hashes[::2]
