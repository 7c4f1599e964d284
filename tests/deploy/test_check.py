"""The check of deploy/ finds what it looks for: each mistake is made in a rendered overlay."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.deploy import check
from tests.deploy.checks import compose, probes, programs, running
from tests.deploy.checks.commands import in_container
from tests.deploy.checks.manifests import DEPLOY, KUBERNETES, Json, Overlay, overlays, rendered
from tests.fakes import pods
from tests.kubernetes.kubectl import NoKubectl, kubectl

from kvrouter.engines.engine import Role
from kvrouter.membership.kubernetes.engines import of_pod, read_url
from kvrouter.membership.kubernetes.objects import Pod


@pytest.fixture(scope="module", autouse=True)
def _kubectl() -> None:
    try:
        kubectl()
    except NoKubectl as problem:
        pytest.skip(f"{problem}: run on Linux on x86_64, with pip's index")


def named(overlay: Overlay, kind: str, name: str) -> Json:
    (found,) = (each for each in overlay.of(kind) if each["metadata"]["name"].startswith(name))
    return found


def pod(overlay: Overlay, kind: str, name: str) -> Json:
    found: Json = named(overlay, kind, name)["spec"]["template"]["spec"]
    return found


def container(overlay: Overlay, kind: str = "Deployment", name: str = "kvrouter") -> Json:
    found: Json = pod(overlay, kind, name)["containers"][0]
    return found


def changed(name: str) -> Overlay:
    """An overlay that a test may spoil."""
    return deepcopy(rendered(KUBERNETES / "overlays" / name))


def complaints(overlay: Overlay) -> list[str]:
    return [each for one in check.OF_OVERLAY for each in one.complaints(overlay)]


def test_every_overlay_holds() -> None:
    assert list(check.of_overlays(overlays())) == []


Spoil = Callable[[Overlay], Any]
MISTAKES: dict[str, tuple[Spoil, str]] = {
    "a field that Kubernetes does not know": (
        lambda o: named(o, "Deployment", "kvrouter")["spec"].update(replica=3),
        "'replica' was unexpected",
    ),
    "a flag that kvrouter does not know": (
        lambda o: container(o)["args"].append("--queue-sise=3"),
        "--queue-sise",
    ),
    "a value that kvrouter refuses": (
        lambda o: container(o)["args"].append("--queue-size=many"),
        "queue-size",
    ),
    "a variable that kvrouter does not read": (
        lambda o: container(o)["env"].append({"name": "KVROUTER_QUEUE_SISE", "value": "3"}),
        "reads no variable KVROUTER_QUEUE_SISE",
    ),
    "a setting that kvrouter does not know": (
        lambda o: named(o, "ConfigMap", "kvrouter-settings")["data"].update(
            {"settings.yaml": "queue_sise: 3"}
        ),
        "queue_sise",
    ),
    "a store that is open to all without --insecure": (
        lambda o: container(o, "StatefulSet", "kvstore")["env"].pop(),
        "any host that reaches 0.0.0.0",
    ),
    "a store that no Service names": (
        lambda o: named(o, "Service", "kvstore")["metadata"].update(name="store"),
        "no Service kvstore with port 7400",
    ),
    "a drain that is cut short": (
        lambda o: pod(o, "Deployment", "kvrouter").update(terminationGracePeriodSeconds=300),
        "killed after 300 s, but may need 305 s",
    ),
    "a pool that fills the container's memory": (
        lambda o: container(o, "StatefulSet", "kvstore")["resources"]["limits"].update(
            memory="256Mi"
        ),
        "a limit of 268435456 bytes",
    ),
    "a port that the container does not list": (
        lambda o: container(o)["ports"].pop(),
        "control_port 8001 is none of its ports",
    ),
    "a Service that selects nothing": (
        lambda o: named(o, "Service", "kvstore")["spec"]["selector"].update(tier="x"),
        "Service/kvstore: it selects no pods",
    ),
    "a Service for a port that is not there": (
        lambda o: named(o, "Service", "kvstore")["spec"]["ports"][0].update(targetPort="kvs"),
        "has no port kvs",
    ),
    "variables of Services, one of which is KVROUTER_PORT": (
        lambda o: pod(o, "Deployment", "kvrouter").pop("enableServiceLinks"),
        "enableServiceLinks is not false",
    ),
    "a ConfigMap that is not there": (
        lambda o: pod(o, "Deployment", "kvrouter")["volumes"][0]["configMap"].update(name="x"),
        "no ConfigMap x",
    ),
    "a variable before the one that it names": (
        lambda o: container(o)["env"].insert(0, {"name": "A", "value": "$(KVROUTER_STORE)"}),
        "A: no variable KVROUTER_STORE before it",
    ),
    "two budgets for one pod": (
        lambda o: named(o, "PodDisruptionBudget", "kvrouter")["spec"].update(selector={}),
        "it has 2 PodDisruptionBudgets",
    ),
    "a policy that stops what the fleet needs": (
        lambda o: named(o, "NetworkPolicy", "store-clients")["spec"].update(egress=[]),
        "Deployment/kvrouter cannot reach demo: StatefulSet/kvstore at port 7400",
    ),
    "a policy that lets everything through": (
        lambda o: named(o, "NetworkPolicy", "default-deny")["spec"].update(
            ingress=[{}], egress=[{}]
        ),
        "Deployment/engine-decode may reach demo: Deployment/kvrouter at port 8001",
    ),
    "a container that may run as root": (
        lambda o: pod(o, "Deployment", "kvrouter")["securityContext"].pop("runAsNonRoot"),
        "runAsNonRoot is not true",
    ),
    "a container that keeps its capabilities": (
        lambda o: container(o)["securityContext"]["capabilities"].update(drop=[]),
        "does not drop ALL capabilities",
    ),
    "a folder of the node": (
        lambda o: pod(o, "Deployment", "kvrouter")["volumes"].append(
            {"name": "run", "hostPath": {"path": "/run"}}
        ),
        "volume run is a hostPath",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(spoil: Spoil, said: str) -> None:
    overlay = changed("demo")
    spoil(overlay)
    assert [each for each in complaints(overlay) if said in each]


def test_a_field_that_a_custom_resource_does_not_know_is_found() -> None:
    overlay = changed("production")
    named(overlay, "ScaledObject", "engine-decode")["spec"].update(maxReplicas=3)
    assert [each for each in complaints(overlay) if "'maxReplicas' was unexpected" in each]


def test_routers_find_the_store_of_each_node_as_they_find_engines() -> None:
    overlay = rendered(KUBERNETES / "overlays" / "store-per-node")
    (router,) = (each for each in overlay.containers() if each.where.endswith("/router"))
    with in_container(overlay, router) as found:
        assert found.settings.store_discovery
        wanted = read_url(found.settings.discovery[0])
        heard = [*found.settings.store_events_connect, *found.settings.store_events_replay]
    (node,) = (each for each in overlay.containers() if each.where.endswith("/store"))
    with in_container(overlay, node) as told:
        config = told.settings.kv_events_config
    assert [config.endpoint, config.replay_endpoint] == [f"tcp://*:{port}" for port in heard]
    made = named(overlay, "DaemonSet", "kvstore")["spec"]["template"]
    shown = pods.pod("10.0.0.1") | {"metadata": made["metadata"], "spec": made["spec"]}
    (store,) = of_pod(msgspec.convert(shown, Pod), wanted).engines
    assert (store.address, store.role) == ("kv://10.0.0.1:7400", Role.STORE)


def test_a_setting_that_the_connector_does_not_know_is_found() -> None:
    overlay = changed("production")
    args = container(overlay, name="engine-decode")["args"]
    args[-1] = args[-1].replace('"url"', '"uri"')
    assert [each for each in complaints(overlay) if "'uri' is not a setting" in each]


async def test_a_probe_of_a_path_that_is_not_there_is_found(tmp_path: Path) -> None:
    overlay = changed("demo")
    container(overlay)["readinessProbe"]["httpGet"]["path"] = "/readyz"
    asked = probes.of_overlay(overlay)
    assert await probes.complaints(asked, tmp_path) == [
        "demo: Deployment/kvrouter/router: kvrouter serve answers /readyz 404"
    ]


def test_a_program_that_is_missing_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: object) -> running.Checked:
        raise running.Absent("there is no envoy")

    monkeypatch.setattr(check, "overlays", list)
    monkeypatch.setattr(compose, "probed", lambda: ())
    held = dict.fromkeys(programs.PROGRAMS, _holds)
    monkeypatch.setattr(check, "PROGRAMS", {**held, "envoy": missing})
    assert check.main([]) == 1
    assert "there is no envoy; --without envoy leaves it out" in capsys.readouterr().out
    assert check.main(["--without", "envoy"]) == 0
    assert capsys.readouterr().out.endswith(
        "envoy NOT CHECKED, haproxy 1, compose 1, systemd 1: all hold\n"
    )


def _holds(_: object) -> running.Checked:
    return running.Checked(1, [])


def test_a_file_for_which_promtool_has_no_check_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prometheus").mkdir()
    (tmp_path / "prometheus" / "notes.txt").touch()
    monkeypatch.setattr(programs, "DEPLOY", tmp_path)
    monkeypatch.setattr(programs, "ROOT", tmp_path)
    monkeypatch.setattr(programs, "found", lambda *_: "true")
    said = programs.promtool([]).complaints
    assert said == ["prometheus/notes.txt: promtool has no check for it"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd-analyze: run with .ci/stages/deploy.sh",
)
@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("ProtectHoem=yes", "ProtectHome=yes", "Unknown key 'ProtectHoem'"),
        ("TimeoutStopSec=10", "TimeoutStopSec=40", "killed after 10 s, but may need 30 s"),
        ("kvrouter serf", "kvrouter serve", "kvrouter has no command"),
    ],
)
def test_a_mistake_in_a_unit_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str, right: str, said: str
) -> None:
    shutil.copytree(DEPLOY / "systemd", tmp_path / "systemd")
    unit = tmp_path / "systemd" / "kvrouter.service"
    unit.write_text(unit.read_text().replace(right, wrong))
    monkeypatch.setattr(programs, "DEPLOY", tmp_path)
    assert [each for each in programs.systemd([]).complaints if said in each]


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="no Compose v2: run with .ci/stages/deploy.sh"
)
@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("{image: kvrouter:local, comand: serve}", "comand"),
        ("{image: kvrouter:local, command: serve --prot 8000}", "--prot"),
        (
            "{image: kvrouter:1, command: serve --decode a:1, stop_grace_period: 9s}",
            "after 9 s",
        ),
    ],
)
def test_a_mistake_in_a_compose_file_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str, said: str
) -> None:
    (tmp_path / "docker-compose.yml").write_text(f"name: x\nservices: {{router: {service}}}\n")
    monkeypatch.setattr(compose, "DEPLOY", tmp_path)
    assert [each for each in compose.check([]).complaints if said in each]
