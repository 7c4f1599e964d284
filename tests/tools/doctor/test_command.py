"""`kvrouter doctor` as scripts and people run it: flags, files, exit codes, what is printed."""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.redis import MISSING, RedisServer, redis_server
from tests.tools.doctor.conftest import Rig
from tests.tools.doctor.test_planted_faults import rdma, skewed_clock

from kvrouter.cli.main import main
from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.redis import EntryKeys
from kvrouter.membership.discovery.register import EngineRegistration
from kvrouter.redis.client import RedisClient
from kvrouter.tools.demo.children import free_port
from kvrouter.tools.doctor.base import Check, Finding, Setup, Severity
from kvrouter.tools.doctor.run import DoctorSettings, Report, examine

PATIENT = ("--max-concurrent-requests", "64", "--health-timeout-s", "20")
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from kvrouter.cli.main import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def flags(rig: Rig, *more: str) -> list[str]:
    """The router's flags for a set-up, few requests so that any machine has descriptors."""
    named = ["--prefill", rig.address("prefill"), "--decode", rig.address("decode")]
    return [*named, "--store", rig.url, *PATIENT, *more]


def doctor(capsys: Any, *args: str) -> tuple[int, str]:
    code = main(["doctor", *args])
    return code, capsys.readouterr().out


def test_a_set_up_that_is_well_ends_with_exit_code_0(rig: Rig, capsys: Any) -> None:
    rig.start()
    code, out = doctor(capsys, *flags(rig))
    assert code == 0
    shares = [line for line in out.splitlines() if " shares " in line]
    assert shares == [
        f"{role} engine {rig.address(role)} shares full_attention: a hit needs all blocks"
        for role in ("prefill", "decode")
    ]
    assert "\n\nnothing found: " in out
    assert f"2 engines, the store at {rig.url}, this host" in out


def test_json_is_an_object_with_findings_of_five_members(rig: Rig, capsys: Any) -> None:
    rig.start()
    dead = f"127.0.0.1:{free_port()}"
    code, out = doctor(capsys, *flags(rig, "--json", "--decode", dead))
    assert code == 1
    told = json.loads(out)
    assert [group["reach"] for group in told["shared"]] == [None, None]
    (finding,) = told["findings"]
    assert finding.keys() == {"check", "severity", "subject", "finding", "remedy"}
    assert (finding["check"], finding["severity"]) == ("engine-reachable", "error")
    assert finding["subject"] == f"decode engine {dead}"


def test_warnings_fail_only_where_that_is_asked_for(rig: Rig, capsys: Any) -> None:
    rig.more.append(skewed_clock)
    rig.start()
    assert doctor(capsys, *flags(rig))[0] == 0
    code, out = doctor(capsys, *flags(rig, "--strict"))
    assert code == 1
    assert out.startswith(f"WARNING clock: prefill engine {rig.address('prefill')}\n    Its clock")
    assert "\n    -> Let NTP" in out
    assert "\n1 warning: " in out


def test_the_file_of_the_router_is_taken_as_it_is(rig: Rig, tmp_path: Path, capsys: Any) -> None:
    rig.start()
    file = tmp_path / "router.yaml"
    named = {"prefill": [rig.address("prefill")], "decode": [rig.address("decode")]}
    file.write_text(
        yaml.safe_dump({**named, "store": rig.url, "max_concurrent_requests": 64, "port": 8000})
    )
    assert doctor(capsys, "--config", str(file))[0] == 0


def test_any_of_prefill_decode_and_store_alone_is_examined(rig: Rig, capsys: Any) -> None:
    rig.start()
    for given in (
        ("--prefill", rig.address("prefill")),
        ("--decode", rig.address("decode")),
        ("--store", rig.url),
        (),
    ):
        assert doctor(capsys, *given, *PATIENT)[0] == 0, given


def test_wrong_use_ends_with_exit_code_2(capsys: Any) -> None:
    assert main(["doctor", "--store", "http://no.store"]) == 2
    assert "kv://HOST:PORT" in capsys.readouterr().err


def test_the_descriptors_of_the_process_that_asks_are_looked_at(rig: Rig) -> None:
    rig.start()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "--store", rig.url, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["check"], done.returncode) == ("open-files", 0)
    assert "256 descriptors" in finding["finding"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256, "ours stay as they were"


def test_an_engine_that_takes_too_long_for_a_token_is_given_up(rig: Rig, capsys: Any) -> None:
    rig.decode["prefill_overhead"] = "600s"
    rig.start()
    slow = ("--decode", rig.address("decode"), *PATIENT)
    code, out = doctor(capsys, *slow, "--doctor-deadline", "0.5")
    assert code == 1
    assert "/v1/completions does not answer within 0.5 s" in " ".join(out.split())


def test_a_hosts_files_are_looked_for_where_its_root_is_mounted(rig: Rig, capsys: Any) -> None:
    rdma(rig, ("fe80::7", "RoCE v2"))
    rig.start()
    code, out = doctor(capsys, *flags(rig, "--host-root", str(rig.root), "--json"))
    assert code == 0
    assert "rdma-gid" in [each["check"] for each in json.loads(out)["findings"]]


def test_engines_of_a_discovery_file_are_examined_like_others(
    rig: Rig, tmp_path: Path, capsys: Any
) -> None:
    rig.start()
    file, dead = tmp_path / "engines.yaml", f"127.0.0.1:{free_port()}"
    file.write_text(yaml.safe_dump({"prefill": [rig.address("prefill")], "decode": [dead]}))
    given = ["--decode", rig.address("decode"), "--store", rig.url, "--discovery", str(file)]
    code, out = doctor(capsys, *given, *PATIENT, "--json")
    told = json.loads(out)
    assert [group["reach"] for group in told["shared"]] == [None, None]
    (finding,) = told["findings"]
    assert (code, finding["subject"]) == (1, f"decode engine {dead}")
    assert json.loads(out)["subjects"].startswith("3 engines")


async def register(url: str, rig: Rig) -> None:
    client, keys = RedisClient(url), EntryKeys("kvrouter")
    for role in (Role.PREFILL, Role.DECODE):
        await EngineRegistration(client, keys, rig.address(role.value), role, 60).renew()
    await client.close()


def test_engines_that_redis_names_are_examined_like_others(
    rig: Rig, tmp_path: Path, capsys: Any
) -> None:
    if redis_server() is None:
        pytest.skip(MISSING)
    rig.start()
    with RedisServer(tmp_path) as redis:
        asyncio.run(register(redis.url, rig))
        capsys.readouterr()  # the registration prints what it registers
        given = ["--store", rig.url, "--discovery", "redis", "--redis", redis.url]
        code, out = doctor(capsys, *given, *PATIENT, "--json")
    assert (code, json.loads(out)["findings"]) == (0, [])
    assert json.loads(out)["subjects"].startswith("2 engines")


def test_a_source_that_cannot_be_read_or_names_no_engine_is_reported(
    tmp_path: Path, capsys: Any
) -> None:
    few = (*PATIENT, "--json")
    missing = str(tmp_path / "missing.yaml")
    code, out = doctor(capsys, "--discovery", missing, *few)
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["check"], finding["severity"]) == (1, "discovery", "error")
    empty = tmp_path / "empty.yaml"
    empty.write_text("decode: []\n")
    code, out = doctor(capsys, "--discovery", str(empty), *few)
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["finding"]) == (0, "it names no member")


async def test_a_check_that_breaks_is_a_finding_and_hides_no_other() -> None:
    async def breaks(setup: Setup) -> AsyncIterator[Finding]:
        raise KeyError("unheard of")
        yield Finding(Severity.INFO, "x", "it is so", "let it be")

    async def finds(setup: Setup) -> AsyncIterator[Finding]:
        yield Finding(Severity.INFO, "x", "it is so", "let it be")

    checks = (Check("breaks", "", breaks), Check("finds", "", finds))
    report = await examine(DoctorSettings(), checks=checks)
    assert [check for check, _ in report.rows] == ["breaks", "finds"]
    assert "KeyError('unheard of')" in report.rows[0][1].finding


async def test_a_check_that_hangs_ends_with_its_deadline() -> None:
    import asyncio

    async def hangs(setup: Setup) -> AsyncIterator[Finding]:
        await asyncio.Event().wait()
        yield Finding(Severity.INFO, "x", "it is so", "let it be")

    report = await examine(DoctorSettings(), deadline_s=0.01, checks=(Check("hangs", "", hangs),))
    assert "did not end within" in report.rows[0][1].finding


def test_the_gravest_findings_stand_first_in_what_is_printed() -> None:
    rows = tuple((each.value, Finding(each, "it", "it is so", "do otherwise")) for each in Severity)
    text = Report(rows, 3, 0.5, "this host").text()
    assert text.endswith("1 error, 1 warning, 1 remark: 3 checks of this host in 0.5 s\n")
    assert text.index("ERROR error") < text.index("WARNING warning") < text.index("INFO info")
