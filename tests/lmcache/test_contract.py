"""Servers of LMCache share objects through a node; LMCache's own loader, keys and memory.

Each server is a process; the node is one of its own. An object has 64 KiB.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.fakes.stall import stall
from tests.lmcache.process import AdapterFailed, AdapterProcess, plugin
from tests.lmcache.spoil import spoil
from tests.vllm.engines import host_and_port
from tests.vllm.services import Service, start_store

OBJECT_BYTES = 64 << 10
Start = Callable[..., AdapterProcess]
pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(600)]


class Told:
    """What a listener of LMCache has heard of a server."""

    def __init__(self, server: AdapterProcess) -> None:
        self._server = server
        self._heard: dict[str, list[int]] = {}

    def all(self, kind: str) -> list[int]:
        """Of these objects, since the server started or `heard` was asked."""
        for each, numbers in self._server.heard().items():
            self._heard.setdefault(each, []).extend(numbers)
        return self._heard[kind]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    """A node for 32 objects."""
    service = start_store(tmp_path, memory="2MiB")
    yield service
    service.stop()


def test_lmcaches_own_check_of_adapters_passes(
    lmcache_python: Path, environment: dict[str, str], store: Service
) -> None:
    command = [str(lmcache_python), "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter"]
    done = subprocess.run(
        [*command, "--num-keys", "7", "--l2-adapter", json.dumps(plugin(url=store.url))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    for verdict in ("7/7 correctly absent", "Batch store OK", "7/7 found", "(content): 7/7"):
        assert verdict in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_one_server_stores_another_finds_and_loads(
    start: Start, store: Service, transport: str
) -> None:
    one = start(url=store.url, transport=transport)
    other = start(url=store.url, transport=transport)
    numbers = list(range(8))
    assert one.store(numbers) == {"stored": True, "bytes": 8 * OBJECT_BYTES}
    assert one.store(numbers) == {"stored": True, "bytes": 0}  # it is there: nothing is sent again
    assert other.find([*numbers, 8, 9]) == numbers
    assert other.load(numbers) == numbers
    other.unlock(numbers)
    assert other.status()["objects_loaded"] == 8
    assert other.status()["transport"] == transport


def test_a_prompt_with_gaps_is_found_and_loaded_with_its_gaps(start: Start, store: Service) -> None:
    one, other = start(url=store.url), start(url=store.url)
    there = [0, 1, 3, 6, 7]
    one.store(there)
    assert other.find(list(range(9))) == there
    assert other.load(list(range(9))) == there


def test_only_the_same_key_finds_an_object(start: Start, store: Service) -> None:
    one, other = start(url=store.url), start(url=store.url)
    one.store([1], salt="alice", rank=1)
    assert other.find([1], salt="alice", rank=1) == [1]
    for of in (
        {"salt": "bob", "rank": 1},
        {"rank": 1},
        {"salt": "alice"},
        {"salt": "alice", "rank": 1, "group": 1},
        {"salt": "alice", "rank": 1, "model": "other"},
    ):
        assert other.find([1], **of) == []


def test_object_groups_have_sizes_of_their_own(start: Start, store: Service) -> None:
    one, other = start(url=store.url), start(url=store.url)
    assert one.store([1, 2], group=1) == {"stored": True, "bytes": OBJECT_BYTES}
    assert other.find([1, 2, 3], group=1) == [1, 2]
    assert other.load([1, 2, 3], group=1) == [1, 2]


def test_servers_with_other_weights_share_nothing(start: Start, store: Service) -> None:
    start(url=store.url, weights_revision="r1").store([1])
    assert start(url=store.url, weights_revision="r2").find([1]) == []
    assert start(url=store.url, weights_revision="r1").find([1]) == [1]


def test_a_server_goes_on_without_its_store_and_uses_it_again_when_it_is_back(
    start: Start, tmp_path: Path
) -> None:
    store = start_store(tmp_path)
    server = start(url=store.url)
    assert eventually(lambda: server.status()["store"] == "there")
    server.store([1, 2])
    store.kill()
    assert server.find([1, 2]) == []
    assert server.status()["store"] == "away"
    assert server.status()["is_healthy"]
    assert server.load([1, 2]) == []
    assert server.store([1, 2]) == {"stored": False, "bytes": 0}
    server.delete([1, 2])
    port = int(host_and_port(store.url).rpartition(":")[2])
    back = start_store(tmp_path, port=port, name="back")
    try:
        assert eventually(lambda: server.status()["store"] == "there")
        assert server.find([1, 2]) == []
        server.store([1, 2])
        assert server.find([1, 2]) == server.load([1, 2]) == [1, 2]
    finally:
        back.stop()


def test_a_server_starts_without_its_store(start: Start) -> None:
    server = start(url="kv://127.0.0.1:9")
    assert server.find([1]) == []
    assert server.store([1]) == {"stored": False, "bytes": 0}
    assert server.status()["store"] == "away"


def test_a_store_that_hangs_costs_one_deadline(start: Start, store: Service) -> None:
    server = start(url=store.url, transport="tcp", deadline_s=0.3)
    server.store([1])
    stall(store.process.pid)
    try:
        assert server.find([1]) == []
        assert server.load([1]) == []
        assert server.store([2]) == {"stored": False, "bytes": 0}
    finally:
        store.process.send_signal(signal.SIGCONT)
    assert eventually(lambda: server.status()["store"] == "there")
    assert server.find([1]) == [1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_corrupt_object_is_a_failed_load(start: Start, store: Service, transport: str) -> None:
    server = start(url=store.url, transport=transport)
    server.store([1, 2])
    spoil(store)
    assert server.find([1, 2]) == [1, 2]
    assert server.load([1, 2]) == []
    assert server.status()["objects_corrupt"] == 2
    server.unlock([1, 2])
    assert server.find([1, 2]) == []
    server.store([1, 2])
    assert server.load([1, 2]) == [1, 2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_found_objects_stay_until_they_are_unlocked(
    start: Start, small: Service, transport: str
) -> None:
    writer, reader = (start(url=small.url, transport=transport) for _ in range(2))
    writer.store([0, 1, 2, 3])
    assert reader.find([0, 1, 2, 3, 4]) == [0, 1, 2, 3]
    for number in range(100, 164):
        writer.store([number])
    assert reader.load([0, 1, 2, 3]) == [0, 1, 2, 3]
    reader.unlock([0, 1])
    reader.unlock([2, 3])
    assert eventually(lambda: small.stats()["leases"] == 0)
    assert reader.status()["leases"] == 0
    for number in range(200, 264):
        writer.store([number])
    assert reader.find([0, 1, 2, 3]) == []


def test_what_nobody_unlocks_is_held_for_a_time_only(start: Start, store: Service) -> None:
    server = start(url=store.url, lock_s=0.2)
    server.store([1, 2])
    assert server.find([1, 2]) == [1, 2]
    assert eventually(lambda: store.stats()["leases"] == 0)
    assert server.status()["locks_expired"] == 2
    server.unlock([1, 2])  # late
    assert server.load([1, 2]) == [1, 2]


def test_what_a_server_held_goes_with_it(start: Start, store: Service) -> None:
    server = start(url=store.url)
    server.store([1])
    server.find([1])
    assert store.stats()["leases"] == 1
    server.end()
    assert eventually(lambda: store.stats()["leases"] == 0)


def test_tenants_find_nothing_of_each_other(start: Start, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"red:{'r' * 32}\nblue:{'b' * 32}\n")
    store = start_store(tmp_path, flags=["--token-file", tokens])
    try:
        red, again = (start(url=store.url, token="r" * 32) for _ in range(2))
        blue, unknown = start(url=store.url, token="b" * 32), start(url=store.url, token="x" * 32)
        assert red.store([1, 2])["stored"]
        assert again.find([1, 2]) == again.load([1, 2]) == [1, 2]
        assert blue.find([1, 2]) == blue.load([1, 2]) == []
        assert blue.store([1, 2]) == {"stored": True, "bytes": 2 * OBJECT_BYTES}
        blue.delete([1, 2])
        assert red.find([1, 2]) == [1, 2]
        assert unknown.find([1, 2]) == []
        assert not unknown.store([3])["stored"]
    finally:
        store.stop()


def test_one_server_deletes_what_another_stored_and_nothing_that_is_locked(
    start: Start, store: Service
) -> None:
    one, other = start(url=store.url), start(url=store.url)
    one.store([1, 2, 3])
    assert one.find([1]) == [1]
    one.delete([1, 2])
    assert one.find([1, 2, 3]) == [1, 3]
    other.delete([3])  # it has stored and looked up nothing
    assert one.find([1, 2, 3]) == [1]


def test_lmcache_is_told_what_was_stored_used_and_deleted(start: Start, store: Service) -> None:
    server = start(url=store.url)
    server.store([1, 2], salt="alice")
    server.store([2, 3])
    server.store([2, 3])
    server.find([3, 4])
    assert server.heard() == {"stored": [1, 2, 2, 3], "accessed": [3], "deleted": []}
    usage = server.usage()
    assert usage["bytes_by_cache_salt"] == {"alice": 2 * OBJECT_BYTES, "": 2 * OBJECT_BYTES}
    assert eventually(lambda: server.usage()["total_bytes_used"] >= 4 * OBJECT_BYTES)
    assert server.usage()["total_capacity_bytes"] == 16 << 20
    assert not usage["global_eviction"]  # the store evicts
    server.delete([1], salt="alice")
    assert server.heard() == {"stored": [], "accessed": [], "deleted": [1]}
    assert server.usage()["bytes_by_cache_salt"]["alice"] == OBJECT_BYTES


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_lmcache_is_told_what_the_store_evicted_and_counts_what_it_has(
    start: Start, small: Service, transport: str
) -> None:
    one, other = (start(url=small.url, transport=transport) for _ in range(2))
    one.store([0, 1])
    for number in range(100, 164):
        other.store([number])
    told = Told(one)
    assert eventually(lambda: told.all("deleted") == [0, 1])
    assert one.usage()["bytes_by_cache_salt"] == {}
    one.store([0, 1])
    one.store([0, 1])
    assert told.all("stored") == [0, 1, 0, 1]
    assert one.usage()["bytes_by_cache_salt"] == {"": 2 * OBJECT_BYTES}
    one.find([0])
    assert eventually(lambda: other.usage()["bytes_by_cache_salt"][""] <= 30 * OBJECT_BYTES)
    assert told.all("deleted") == [0, 1]


def test_lmcache_is_told_at_once_of_what_a_lookup_misses_or_a_load_finds_corrupt(
    start: Start, store: Service
) -> None:
    server, other = start(url=store.url), start(url=store.url)
    server.store(list(range(8)))
    told = Told(server)
    other.delete([6, 7])
    assert server.find(list(range(8))) == list(range(6))
    assert eventually(lambda: told.all("deleted") == [6, 7])
    server.unlock(list(range(6)))
    spoil(store)
    assert server.load([0, 1]) == []
    assert eventually(lambda: told.all("deleted") == [6, 7, 0, 1])
    assert server.usage()["bytes_by_cache_salt"] == {"": 4 * OBJECT_BYTES}


def test_lmcache_is_told_what_a_store_lost_when_it_is_back_and_not_while_it_is_away(
    start: Start, tmp_path: Path
) -> None:
    store = start_store(tmp_path)
    server = start(url=store.url)
    server.store([1, 2])
    told = Told(server)
    store.kill()
    assert server.find([1, 2]) == server.load([1, 2]) == []
    assert server.status()["store"] == "away"
    assert told.all("deleted") == []
    port = int(host_and_port(store.url).rpartition(":")[2])
    back = start_store(tmp_path, port=port, name="back")
    try:
        assert eventually(lambda: told.all("deleted") == [1, 2])
    finally:
        back.stop()


def test_three_eventfds_are_distinct_and_the_end_leaves_nothing_over(
    start: Start, store: Service
) -> None:
    server = start(url=store.url)
    server.store([1])
    assert len(set(server.fds())) == 3
    server.find([1])
    assert server.close() == {"threads": [], "descriptors": 0}
    assert eventually(lambda: store.stats()["leases"] == 0)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, 'ConnectorRefused: "adapter_params" in --l2-adapter: "url" is missing'),
        ({"url": "kv://127.0.0.1:9", "path": "/dev/shm"}, "'path' is not a setting"),
    ],
)
def test_settings_that_mean_nothing_stop_the_server(
    start: Start, params: dict[str, str], told: str
) -> None:
    with pytest.raises(AdapterFailed) as refused:
        start(**params)
    assert told in str(refused.value)
