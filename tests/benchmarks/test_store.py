"""The store benchmark measures what it says: bytes are compared, bars can fail, peers can lack."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from benchmarks import peers_setup
from benchmarks.store.bars import Bar, judge
from benchmarks.store.contender import Call, Contender
from benchmarks.store.crew import Crew, Timed
from benchmarks.store.figures import Cell, Key, Rate, cell, percentile, rate
from benchmarks.store.measure import Results, measure
from benchmarks.store.nodes import Halves, Servers
from benchmarks.store.plan import BATCHES, MATCHES, MIB, MIXERS, RANGED, Effort, Entry, Stage
from benchmarks.store.report import as_json, lines
from benchmarks.store.worker import Worker

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc (apt-get install gcc)")
TINY = Effort(
    rounds=1,
    set_bytes=MIB,
    stages=(Stage("64KiB", 1), Stage("64KiB", 2)),
    mix_s=0.05,
    match_s=0.05,
    least_pool_bytes=64 * MIB,
)
KEY = Key("1MiB", "put", 1, 1)


def figures(contender: str, p50_us: float = 1.0, cpu: float = 1.0, key: Key = KEY) -> Cell:
    return Cell(key, contender, 1.0, p50_us, p50_us, p50_us, cpu, rounds=5, calls=100)


@pytest.mark.parametrize(("percent", "value"), [(10, 10), (50, 50), (99, 99), (100, 100)])
def test_a_percentile_is_one_of_the_values(percent: int, value: int) -> None:
    assert percentile(range(1, 101), percent) == value
    assert percentile([7], percent) == 7


def test_a_cell_has_medians_of_rounds_and_percentiles_of_all_calls() -> None:
    runs = [Timed(2.0, 1.0, (1000, 2000)), Timed(1.0, 3.0, (3000, 9000)), Timed(4.0, 2.0, (4000,))]
    found = cell(KEY, "x", 4_000_000_000, runs)
    assert (found.gb_per_s, found.cpu_s_per_gb, found.rounds, found.calls) == (2.0, 0.5, 3, 5)
    assert (found.p10_us, found.p50_us, found.p99_us) == (1.0, 3.0, 9.0)


def test_a_rate_is_of_all_clients_together() -> None:
    found = rate("x", 4, [Timed(2.0, 0.5, units=100), Timed(1.0, 0.1, units=100)])
    assert (found.per_s, round(found.cpu_us)) == (75.0, 3000)


def test_a_figure_that_is_missing_misses_its_bar() -> None:
    bars = judge(Results())
    assert not any(bar.met for bar in bars.values())
    assert bars["ahead_of_mooncake"].value is None


@pytest.mark.parametrize(("ours", "met"), [(1.15, True), (1.16, False)])
def test_a_ratio_holds_up_to_its_limit(ours: float, met: bool) -> None:
    cells = [figures("memcpy+crc32c"), figures("kvstore shm", p50_us=ours, cpu=ours)]
    bars = judge(Results(cells=cells))
    assert bars["shm_1mib_put_x1_cpu"].met is met
    assert bars["shm_1mib_put_x1_p10"].met  # its limit is higher
    assert not bars["shm_1mib_get_x1_cpu"].met


def test_a_cell_that_is_lost_to_a_peer_is_named() -> None:
    ours = [figures("kvstore tcp", 12, 1), figures("kvstore tcp unverified", 10, 1)]
    bars = judge(Results(cells=[*ours, figures("Redis", 11, 1), figures("Mooncake", 9, 2)]))
    assert bars["ahead_of_redis"] == Bar(0.0, 0.0)
    assert bars["ahead_of_redis_verified"].value == 1.0
    assert not bars["ahead_of_mooncake"].met
    assert bars["ahead_of_mooncake"].lost[0].startswith("put 1 x 1MiB, 1 client: p50 10 beside 9")


@pytest.mark.parametrize(("copies", "limit"), [(10_000, 4.0), (1000, 0.8 * 1.048576)])
def test_the_mix_need_not_exceed_what_copies_reach(copies: float, limit: float) -> None:
    mixed = [Rate("memcpy+crc32c", 2, copies, 1.0, 5), Rate("kvstore shm", 2, 3900, 1.0, 5)]
    bar = judge(Results(mixed=mixed))["mixed_shm_1mib_c2_gb_per_s"]
    assert bar.limit == pytest.approx(limit)
    assert bar.met


def test_the_table_names_missing_stores_and_missed_bars() -> None:
    results = Results(cells=[figures("memcpy")], skipped={"Redis": "no program redis-server"})
    text = "\n".join(lines(results, judge(results)))
    assert "Redis was left out: no program redis-server" in text
    assert "MISSED ahead_of_redis: not measured" in text


def test_figures_are_told_with_their_bars() -> None:
    cells = [figures("memcpy+crc32c"), figures("kvstore shm", cpu=1.2)]
    results = Results(cells=cells, skipped={"Redis": "no program"}, versions={"Mooncake": "1"})
    written = json.loads(json.dumps(as_json(results, {"cores": 2})))
    assert written["machine"] == {"cores": 2}
    assert (written["skipped"], written["versions"]) == (results.skipped, results.versions)
    found = {key: written["cells"][1][key] for key in ("contender", "size", "op", "cpu_s_per_gb")}
    assert found == {"contender": "kvstore shm", "size": "1MiB", "op": "put", "cpu_s_per_gb": 1.2}
    bar = written["bars"]["shm_1mib_put_x1_cpu"]
    assert (bar["value"], bar["limit"], bar["met"]) == (1.2, 1.15, False)


def test_bytes_of_another_round_are_no_success() -> None:
    worker = Worker()
    seat = {"client": 0, "block_bytes": 4096, "blocks": 16, "server": {}}
    seat["options"] = {"digest": "none"}
    maker = "benchmarks.store.contenders.copies:Copy"
    worker.open("copy", maker, 1 << 16, seat)
    worker.fresh("copy", 1)
    worker.run("copy", "put", 1, 0.0)
    worker.run("copy", "get", 16, 0.0)
    assert worker.check("copy") == {"compared": 1 << 16}
    worker.fresh("copy", 2)
    worker.run("copy", "get", 16, 0.0)
    found = "client 0, block 0 of 16, 2 bytes from 0 to 4080, there 01"
    with pytest.raises(ValueError, match=f"other bytes came back than were put: {found}"):
        worker.check("copy")


class Losing(Contender):
    """Gets two blocks, then one of them, and other bytes in the place of the second."""

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        for block in range(2):
            self.seat.landed(block)[:] = self.seat.sent(block)
        if turn:
            self.seat.landed(1)[5:9] = b"lost"
        return 1, range(2 - min(turn, 1))


def test_blocks_that_a_later_turn_did_not_get_are_not_compared() -> None:
    worker, seat = Worker(), {"client": 0, "block_bytes": 4096, "blocks": 16}
    worker.open("it", f"{__name__}:Losing", 1 << 16, seat | {"server": {}, "options": {}})
    worker.fresh("it", 1)
    assert worker.sustain("it", "mix", 0.02, 0.0)["units"] > 1
    assert worker.check("it") == {"compared": 4096}


class Refusing(Contender):
    """Says after its fourth put that it has not stored the block."""

    def putting(self, first: int, blocks: int) -> Call:
        return lambda: "full" if first == 4 else None


def test_a_call_that_answers_that_it_failed_is_no_success() -> None:
    worker, seat = Worker(), {"client": 0, "block_bytes": 4096, "blocks": 16}
    worker.open("it", f"{__name__}:Refusing", 1 << 16, seat | {"server": {}, "options": {}})
    with pytest.raises(RuntimeError, match="answered full"):
        worker.run("it", "put", 1, 0.0)


def test_what_a_client_cannot_do_is_its_answer() -> None:
    found = Worker().answer({"do": "fresh", "entry": "nobody", "stamp": 1})
    assert found == {"error": "KeyError: 'nobody'"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A short real measurement of every store that is installed."""
    return measure(TINY, tmp_path_factory.mktemp("measured"))


def rows(entries: Iterable[Entry]) -> set[tuple[Key, str]]:
    return {
        (Key(stage.size, op, batch, stage.clients), entry.name)
        for stage in TINY.stages
        for entry in entries
        for op in entry.ops
        for batch in BATCHES
    }


def test_every_row_of_ours_and_of_the_floors_is_measured(measured: Results) -> None:
    cells = {(found.key, found.contender): found for found in measured.cells}
    assert cells.keys() >= rows(entry for entry in RANGED if not entry.is_peer)
    assert all(found.gb_per_s > 0 and found.cpu_s_per_gb > 0 for found in measured.cells)
    assert cells[Key("64KiB", "put", 1, 2), "kvstore shm"].calls == 32
    assert cells[Key("64KiB", "get", 16, 1), "kvstore tcp unverified"].calls == 1


@pytest.mark.parametrize("name", peers_setup.NAMES)
def test_every_row_of_a_peer_that_is_set_up_is_measured(name: str, measured: Results) -> None:
    try:
        found = peers_setup.find(name)
    except RuntimeError as error:
        pytest.skip(f"{error}: run with python -m benchmarks.peers_setup {name}")
    assert name not in measured.skipped
    assert measured.versions[name] == found.version
    cells = {(found.key, found.contender) for found in measured.cells}
    assert cells >= rows(entry for entry in RANGED if entry.server == name)


def test_mixes_and_matches_are_measured(measured: Results) -> None:
    assert {found.contender for found in measured.mixed} == {entry.name for entry in MIXERS}
    there = [(entry, n) for entry, n in MATCHES if entry.server not in measured.skipped]
    wanted = {(entry.name, number) for entry, numbers in there for number in numbers}
    assert {(found.contender, found.clients) for found in measured.matches} == wanted
    assert all(found.per_s > 0 for found in [*measured.mixed, *measured.matches])


@pytest.mark.parametrize(("family", "address"), [("AF_INET", ""), ("AF_INET6", "::")])
def test_a_peer_that_would_listen_everywhere_stays_on_loopback(
    family: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = f"import socket; s = socket.socket(socket.{family}); s.bind(({address!r}, 0)); "
    done = subprocess.run(
        [sys.executable, "-c", program + "print(s.getsockname()[0])"],
        env={"LD_PRELOAD": str(peers_setup.loopback_bind())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().removeprefix("::ffff:") == "127.0.0.1"


def test_a_peer_without_environment_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"python -m benchmarks\.peers_setup Mooncake"):
        peers_setup.find("Mooncake")


@pytest.mark.parametrize(
    ("usable", "placed"),
    [
        ({0, 1}, "servers on core 1, clients on core 0"),
        ({3}, "servers on core 3, clients on core 3"),
        ({0, 2, 4, 6, 7}, "servers on cores 6, 7, clients on cores 0, 2, 4"),
    ],
)
def test_servers_and_clients_have_cores_of_their_own_where_there_are_two(
    usable: set[int], placed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    assert str(Halves.pick()) == placed


def test_a_server_runs_on_its_cores_and_a_client_on_others(tmp_path: Path) -> None:
    halves = Halves.pick()
    with Servers(tmp_path, 64 * MIB, {}, halves.servers) as hall:
        assert os.sched_getaffinity(hall.node("kvstore checked").pids[0]) == set(halves.servers)
    with Crew(tmp_path, {}, halves.clients) as crew:
        (client,) = crew.clients("", 1)
        assert os.sched_getaffinity(client.pid) == set(halves.clients)


def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_output(
    tmp_path: Path,
) -> None:
    liar = tmp_path / "redis-server"
    liar.write_text("#!/bin/sh\necho no such luck\n")
    liar.chmod(0o755)
    found = {"Redis": peers_setup.Found("Redis", liar, "0")}
    with (
        Servers(tmp_path, MIB, found, Halves.pick().servers) as hall,
        pytest.raises(RuntimeError, match="Redis did not start: no such luck"),
    ):
        hall.node("Redis")
