"""The doctor finds each fault that is planted in a set-up that is well but for that, and says what
to do; in one that is well it finds nothing.
"""

import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.fakes.link import Link
from tests.tools.doctor.conftest import TOKEN, Rig
from tests.unit.store.rdma.test_ports import Machine

from kvrouter.tools.demo.children import free_port
from kvrouter.tools.doctor.base import Severity

SKEWED_DATE = b"date: Thu, 01 Jan 2026 00:00:00 GMT\r\n"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        plant: makes it so, before the set-up is started.
        check: finds it.
        finding, remedy: words of what is said of it.
        besides: other checks that may say something of it too.
        severity: how grave it is.
    """

    plant: Callable[[Rig], None]
    check: str
    finding: str
    remedy: str
    besides: frozenset[str] = field(default_factory=frozenset)
    severity: Severity = Severity.ERROR


def later(act: Callable[[Rig], None]) -> Callable[[Rig], None]:
    """A fault of a set-up that runs."""
    return lambda rig: rig.more.append(act)


def dead(rig: Rig) -> None:
    rig.router["decode"] = [rig.address("decode"), f"127.0.0.1:{free_port()}"]


def stalled(rig: Rig) -> None:
    """A server that takes connections and never answers, as one that is stopped."""
    deaf = socket.create_server(("127.0.0.1", 0))
    rig.more_sockets.append(deaf)
    rig.router["decode"] = [rig.address("decode"), f"127.0.0.1:{deaf.getsockname()[1]}"]


def without_room(rig: Rig) -> None:
    rig.store["pool_bytes"] = 8192


def another_store(rig: Rig) -> None:
    other = rig.start_store(pool_bytes=16 << 20, granule_bytes=4096)
    rig.decode["store"] = f"kv://127.0.0.1:{other.port}"


def skewed_tokenizer(rig: Rig) -> None:
    tokenizer = rig.engines["decode"].server.engine.tokenizer
    right = tokenizer.encode
    tokenizer.encode = lambda text: [3, *right(text)]  # type: ignore[method-assign]


def skewed_template(rig: Rig) -> None:
    tokenizer = rig.engines["decode"].server.engine.tokenizer
    right = tokenizer.render_chat
    tokenizer.render_chat = (  # type: ignore[method-assign]
        lambda messages, **more: [3, *right(messages, **more)]
    )


def skewed_clock(rig: Rig) -> None:
    rig.engines["prefill"].server.http.date = lambda: SKEWED_DATE  # type: ignore[method-assign]


def lost_puts(rig: Rig) -> None:
    rig.router["landing_timeout_s"] = 0.5
    link = rig.engines["prefill"].server.engine.link
    assert link is not None

    async def save(hashes: object, first: int, slots: list[int]) -> int:
        return len(slots)

    link.save = save  # type: ignore[method-assign]


def corrupt_loads(rig: Rig) -> None:
    """A decode engine that loads a wrong byte and does not check it."""
    rig.decode.update(verify_kv=False, kv_corruption_rate=100)


def another_version(rig: Rig) -> None:
    rig.engines["prefill"].server.version = "0.29.1"


def token_not_given(rig: Rig) -> None:
    rig.store["tenants"], rig.token = [("team", TOKEN)], TOKEN
    rig.router["store_token"] = ""


def plain_store(rig: Rig) -> None:
    rig.router["store"] = f"kvs://127.0.0.1:{rig.node.port}"


def few_descriptors(rig: Rig) -> None:
    rig.limit = lambda number: 256 if number == resource.RLIMIT_NOFILE else -1


def rdma(rig: Rig, *gids: tuple[str, str], mtu: int = 9000, state: str = "4: ACTIVE") -> None:
    """Files of an RDMA device of one port, on an interface of that MTU."""
    folder = rig.root / "sys/class/infiniband"
    folder.mkdir(parents=True)
    Machine(folder).device("mlx5_0", *gids, state=state)
    names = folder / "mlx5_0/ports/1/gid_attrs/ndevs"
    names.mkdir()
    for index, _ in enumerate(gids):
        (names / str(index)).write_text("eth7\n")
    interface = rig.root / "sys/class/net/eth7"
    interface.mkdir(parents=True)
    (interface / "mtu").write_text(f"{mtu}\n")


def little_locked_memory(rig: Rig) -> None:
    rdma(rig, ("10.0.0.7", "RoCE v2"))
    rig.limit = lambda number: 65536 if number == resource.RLIMIT_MEMLOCK else -1


def no_events(rig: Rig) -> None:
    """Only the prefill engine publishes."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    rig.prefill["kv_events_endpoint"] = endpoint
    rig.router["kv_events_bind"] = endpoint


FAULTS = {
    "a dead port": Fault(
        later(dead), "engine-reachable", "reached: Connection refused", "start it"
    ),
    "a stalled engine": Fault(
        later(stalled), "engine-reachable", "/health does not answer within 10 s", "its log"
    ),
    "a model that is not served": Fault(
        lambda rig: rig.router.update(model="other"),
        "engine-introduction",
        "it serves tiny, not --model other",
        "do what the sentence says",
    ),
    "another model": Fault(
        lambda rig: rig.decode.update(model="other"),
        "models",
        "it serves other, which no prefill engine does",
        "--served-model-name",
    ),
    "another context length": Fault(
        lambda rig: rig.decode.update(max_model_len=1024),
        "context-length",
        "max_model_len of tiny is",
        "--max-model-len",
        severity=Severity.WARNING,
    ),
    "another version": Fault(
        later(another_version),
        "engine-version",
        "it runs version 0.29.1",
        "the same version",
        severity=Severity.WARNING,
    ),
    "another block size": Fault(
        lambda rig: rig.decode.update(block_size=32),
        "block-size",
        "blocks have 16 tokens there and 32 tokens elsewhere",
        "--block-size",
        frozenset({"context-length"}),
    ),
    "another hash seed": Fault(
        lambda rig: rig.decode.update(hash_seed="7"),
        "block-hashes",
        "blocks are named by sha256_cbor from root",
        "PYTHONHASHSEED",
    ),
    "other weights": Fault(
        lambda rig: rig.decode.update(weights_revision="v2"),
        "weights",
        "tiny at revision sim there and tiny at revision v2 elsewhere",
        "--revision",
    ),
    "another layout": Fault(
        lambda rig: rig.decode.update(kv_bytes_per_token=512),
        "kv-layout",
        "1 of 4096 bytes",
        "docs/kv-layouts.md",
    ),
    "no connector": Fault(
        lambda rig: rig.decode.update(store=None),
        "connector",
        "no connector of it is loaded there",
        "--kv-transfer-config",
    ),
    "another store": Fault(
        another_store,
        "same-store",
        "of 2 engines with the manifest",
        "the store that --store names",
        frozenset({"connector-role"}),
    ),
    "a prefill engine that is a consumer": Fault(
        lambda rig: rig.prefill.update(role="decode"),
        "connector-role",
        "stored none of them",
        "kv_producer",
    ),
    "a landing that never comes": Fault(
        later(lost_puts), "landing", "it said that it stores 4 blocks, and 0 were there", "puts"
    ),
    "wrong bytes after a load": Fault(
        corrupt_loads,
        "end-to-end",
        "the answer differs from token ",  # the first that is said may be the right one by chance
        "do not serve with this pair",
    ),
    "a skewed tokenizer": Fault(
        later(skewed_tokenizer), "tokenizer", "differ from number 0 on", "tokenizer files"
    ),
    "a skewed chat template": Fault(
        later(skewed_template), "chat-template", "a trial conversation", "--chat-template"
    ),
    "a store that is down": Fault(
        later(lambda rig: rig.node.stop()), "store-reachable", "Connection refused", "start it"
    ),
    "a token that is not given": Fault(
        token_not_given, "store-token", "got none", "KVROUTER_STORE_TOKEN"
    ),
    "a store without TLS": Fault(
        later(plain_store), "store-tls", "TLS with it fails", "--store-ca-file"
    ),
    "a store without room": Fault(
        without_room,
        "store-room",
        "holds 2 blocks of tiny",
        "--memory of several times",
        frozenset({"connector-role", "store-pressure"}),
    ),
    "a socket that cannot be reached": Fault(
        later(lambda rig: rig.unix_path.unlink()),
        "store-transport",
        "it runs on this host, and yet KV would travel over TCP",
        "--unix-socket",
        severity=Severity.WARNING,
    ),
    "an engine without KV events": Fault(
        no_events,
        "kv-events",
        "no KV event of topic kv@",
        "--kv-events-config",
        severity=Severity.WARNING,
    ),
    "a clock that is wrong": Fault(
        later(skewed_clock), "clock", "behind this host's", "NTP", severity=Severity.WARNING
    ),
    "few descriptors": Fault(
        few_descriptors,
        "open-files",
        "may have 256 descriptors",
        "ulimit -Hn 8448",
        severity=Severity.WARNING,
    ),
    "little memory to lock": Fault(
        little_locked_memory,
        "locked-memory",
        "may lock 64.0KiB",
        "ulimit -l unlimited",
        severity=Severity.WARNING,
    ),
    "an RDMA port that is down": Fault(
        lambda rig: rdma(rig, ("10.0.0.7", "RoCE v2"), state="1: DOWN"),
        "rdma-port",
        "port 1 of mlx5_0 is 1: DOWN",
        "bring its link up",
        severity=Severity.WARNING,
    ),
    "an RDMA port without a RoCE v2 GID": Fault(
        lambda rig: rdma(rig, ("10.0.0.7", "IB/RoCE v1")),
        "rdma-gid",
        "has no RoCE v2 GID",
        "--hint-gid-index",
        severity=Severity.WARNING,
    ),
    "an RDMA port whose GID is link-local": Fault(
        lambda rig: rdma(rig, ("fe80::7", "RoCE v2")),
        "rdma-gid",
        "link-local",
        "routable IP address",
        severity=Severity.WARNING,
    ),
    "an RDMA port of a small MTU": Fault(
        lambda rig: rdma(rig, ("10.0.0.7", "RoCE v2"), mtu=1500),
        "rdma-mtu",
        "eth7 has an MTU of 1500, so that RDMA packets carry 1024 bytes",
        "mtu 9000",
        severity=Severity.WARNING,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_remedy(rig: Rig, name: str) -> None:
    fault = FAULTS[name]
    fault.plant(rig)
    rig.start()
    report = rig.examine()
    findings = [finding for check, finding in report.rows if check == fault.check]
    assert findings, report.text()
    assert all(fault.finding in each.finding for each in findings), report.text()
    assert all(fault.remedy in each.remedy for each in findings), report.text()
    assert {each.severity for each in findings} == {fault.severity}
    others = {check for check, _ in report.rows} - {fault.check}
    assert others <= fault.besides, report.text()


# To engines an endpoint with "::" is one to bind.
@pytest.mark.parametrize("host", ["127.0.0.1", "[0:0:0:0:0:0:0:1]"])
def test_a_set_up_that_is_well_has_no_findings(rig: Rig, host: str) -> None:
    endpoint = f"tcp://{host}:{free_port()}"
    rig.prefill["kv_events_endpoint"] = rig.decode["kv_events_endpoint"] = endpoint
    rig.router["kv_events_bind"] = endpoint
    rdma(rig, ("10.0.0.7", "RoCE v2"))
    rig.start()
    report = rig.examine()
    assert report.rows == (), report.text()
    assert "nothing found" in report.text()
    decode = rig.engines["decode"]
    assert decode.tokens_from("external_kv_transfer") == 64, "the trial prompt went through"
    stats = rig.node.stats()
    assert stats["leases"] == 0
    assert stats["waits"] == 0


def test_engines_that_started_before_their_store_are_tried_before_they_are_judged(
    rig: Rig,
) -> None:
    rig.engines_first, rig.store["port"] = True, free_port()
    rig.start()
    assert rig.examine().rows == ()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_whose_tries_to_reach_the_store_failed_gets_time_for_more(
    rig: Rig, role: str
) -> None:
    rig.store["port"] = free_port()
    with Link(("127.0.0.1", rig.store["port"])) as link:
        link.refusals = 5
        getattr(rig, role)["store"] = link.url
        rig.start()
        report = rig.examine()
        assert report.rows == (), report.text()
        assert link.refusals == 0


def test_engines_of_both_roles_are_tried_with_each_other(rig: Rig) -> None:
    rig.prefill["role"] = rig.decode["role"] = "both"
    rig.start()
    both = [rig.address("prefill"), rig.address("decode")]
    rig.router["prefill"] = rig.router["decode"] = both
    assert rig.examine().rows == ()
    assert [engine.tokens_from("external_kv_transfer") for engine in rig.engines.values()] == [
        64,
        64,
    ]


def test_a_stalled_engine_holds_up_nothing_that_is_known_without_it(rig: Rig) -> None:
    rig.more += [stalled, skewed_tokenizer]
    rig.start()
    found = {check for check, _ in rig.examine().rows}
    assert found == {"engine-reachable", "tokenizer"}
