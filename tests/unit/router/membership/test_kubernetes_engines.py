"""Which engines Pods and EndpointSlices name, and what is left out."""

from typing import Any

import msgspec
import pytest
from tests.fakes.pods import endpoint, endpoint_slice, pod

from kvrouter.engines.engine import Role
from kvrouter.membership.kubernetes.engines import Odd, of_pod, of_slice, one_of_each, read_url
from kvrouter.membership.kubernetes.objects import EndpointSlice, Pod

PODS, SERVICE = "k8s://test?selector=app=engine", "k8s://test?service=engines&role=decode"

BOOTSTRAP = "kvrouter/bootstrap-port"


def named(found: Any, name: str = "engine-0") -> Any:
    return found | {"metadata": found["metadata"] | {"name": name}}


def in_pods(*pods: Any, url: str = PODS) -> tuple[dict[str, Role], dict[str, int]]:
    wanted = read_url(url)
    read = [msgspec.convert(named(each, f"engine-{n}"), Pod) for n, each in enumerate(pods)]
    found = one_of_each(of_pod(each, wanted) for each in read)
    ports = {each.address: each.bootstrap_port for each in found if each.bootstrap_port}
    return {each.address: each.role for each in found}, ports


def in_slices(*slices: Any, url: str = SERVICE) -> dict[str, Role]:
    wanted = read_url(url)
    read = [msgspec.convert(named(each), EndpointSlice) for each in slices]
    found = one_of_each(of_slice(each, wanted) for each in read)
    return {each.address: each.role for each in found}


def test_a_ready_pod_is_an_engine_with_the_pods_name_as_label() -> None:
    assert in_pods(pod("10.0.0.1"))[0] == {"engine-0=10.0.0.1:8000": Role.DECODE}


@pytest.mark.parametrize(
    "found",
    [
        pod(ready=False),
        pod(leaving=True),
        pod() | {"status": {"phase": "Pending"}},
        pod() | {"status": pod()["status"] | {"phase": "Succeeded"}},
    ],
    ids=["not ready", "terminating", "without an address", "ended"],
)
def test_a_pod_that_is_not_ready_or_is_to_end_is_none(found: Any) -> None:
    assert in_pods(found)[0] == {}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.BOTH])
def test_the_label_tells_the_role_and_the_url_overrides_it(role: Role) -> None:
    assert in_pods(pod(role=role.value))[0] == {"engine-0=10.0.0.1:8000": role}
    said = in_pods(pod(role="decode"), url=f"{PODS}&role={role.value}")
    assert said[0] == {"engine-0=10.0.0.1:8000": role}


def test_a_store_node_is_named_by_its_url_at_the_port_named_kv_else_7400() -> None:
    kv = pod("10.0.0.1", 7401, role="store", port_name="kv")
    assert in_pods(kv)[0] == {"kv://10.0.0.1:7401": Role.STORE}
    assert in_pods(pod("fd00::1", role="store"))[0] == {"kv://[fd00::1]:7400": Role.STORE}
    service = endpoint_slice(endpoint("10.0.0.1", "kvstore-x"), ports={"kv": 7402, "http": 7480})
    found = in_slices(service, url="k8s://test?service=engines&role=store")
    assert found == {"kv://10.0.0.1:7402": Role.STORE}


def test_the_port_is_that_named_http_else_8000() -> None:
    assert in_pods(pod(port=9000))[0] == {"engine-0=10.0.0.1:9000": Role.DECODE}
    assert in_pods(pod(port=9000, port_name="grpc"))[0] == {"engine-0=10.0.0.1:8000": Role.DECODE}
    assert in_pods(pod() | {"spec": {"containers": [{}]}})[0] == {
        "engine-0=10.0.0.1:8000": Role.DECODE
    }


def test_the_url_names_the_port_or_gives_it() -> None:
    assert in_pods(pod(port=9, port_name="api"), url=f"{PODS}&port=api")[0] == {
        "engine-0=10.0.0.1:9": Role.DECODE
    }
    assert in_pods(pod(port=9), url=f"{PODS}&port=7000")[0] == {
        "engine-0=10.0.0.1:7000": Role.DECODE
    }


def test_ipv6_addresses_are_written_in_brackets() -> None:
    assert in_pods(pod("fd00::1"))[0] == {"engine-0=[fd00::1]:8000": Role.DECODE}


def test_an_annotation_tells_the_bootstrap_port() -> None:
    _, ports = in_pods(pod("10.0.0.1", annotations={"kvrouter/bootstrap-port": "8997"}), pod())
    assert ports == {"engine-0=10.0.0.1:8000": 8997}


def test_the_end_of_a_long_name_is_the_label() -> None:
    found = msgspec.convert(named(pod(), "a" * 80 + "-x7f2"), Pod)
    (engine,) = of_pod(found, read_url(PODS)).engines
    assert [engine.address] == ["a" * 58 + "-x7f2=10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("found", "url", "complaint"),
    [
        (pod(role="draft"), PODS, "label kvrouter/role=draft: write prefill, decode, both, store"),
        (pod(), f"{PODS}&port=api", "it has no port named 'api'"),
        (pod("node-1"), PODS, "'node-1' is no IP address"),
        (pod(annotations={BOOTSTRAP: "x"}), PODS, "bootstrap-port: 'x' is no port"),
        (pod(annotations={BOOTSTRAP: "9" * 5000}), PODS, "bootstrap-port: '9{40}' is no port"),
        (pod(annotations={BOOTSTRAP: "\n" * 9000}), PODS, r"port: '(\\n){40}' is no port"),
    ],
)
def test_what_cannot_be_used_is_told(found: Any, url: str, complaint: str) -> None:
    with pytest.raises(Odd, match=complaint):
        of_pod(msgspec.convert(named(found), Pod), read_url(url))


def test_ready_endpoints_of_a_service_are_engines() -> None:
    found = endpoint_slice(
        endpoint("10.0.0.1", "a"),
        endpoint("10.0.0.2", "b", ready=False),
        endpoint("10.0.0.3", "c", ready=True, serving=True, terminating=True),
        endpoint("10.0.0.4", "d", ready=True, serving=False),  # publishNotReadyAddresses
        endpoint("10.0.0.5"),
        {"addresses": ["10.0.0.6", "10.0.9.6"]},
    )
    assert set(in_slices(found)) == {"a=10.0.0.1:8000", "10.0.0.5:8000", "10.0.0.6:8000"}


def test_the_only_port_of_a_service_needs_no_name() -> None:
    one = endpoint_slice(endpoint("10.0.0.1"), ports={"": 9000})
    assert set(in_slices(one)) == {"10.0.0.1:9000"}
    two = endpoint_slice(endpoint("10.0.0.1"), ports={"metrics": 9000, "http": 8080})
    assert set(in_slices(two)) == {"10.0.0.1:8080"}
    none = endpoint_slice(endpoint("10.0.0.1"), ports={})
    assert set(in_slices(none)) == {"10.0.0.1:8000"}


def test_a_pod_with_addresses_of_both_kinds_is_one_engine() -> None:
    six = endpoint_slice(endpoint("fd00::1", "a"), address_type="IPv6")
    four = endpoint_slice(endpoint("10.0.0.1", "a"))
    assert in_slices(six, four) == in_slices(four, six) == {"a=10.0.0.1:8000": Role.DECODE}
    assert in_slices(six) == {"a=[fd00::1]:8000": Role.DECODE}


@pytest.mark.parametrize("left", [[], [endpoint("10.0.0.1", "a", ready=False)]])
def test_a_pod_that_has_left_by_one_kind_of_address_has_left(left: list[Any]) -> None:
    six = endpoint_slice(endpoint("fd00::1", "a"), address_type="IPv6")
    four = endpoint_slice(*left)
    assert in_slices(six, four) == in_slices(four, six) == {}


def test_names_of_hosts_outside_the_cluster_are_no_engines() -> None:
    assert in_slices(endpoint_slice(endpoint("db.example"), address_type="FQDN")) == {}


def test_a_label_of_the_service_tells_the_role() -> None:
    url = "k8s://test?service=engines"
    found = endpoint_slice(endpoint("10.0.0.1"), labels={"kvrouter/role": "prefill"})
    assert in_slices(found, url=url) == {"10.0.0.1:8000": Role.PREFILL}
    with pytest.raises(Odd, match="say role= in the URL, or give the Service the label"):
        in_slices(endpoint_slice(endpoint("10.0.0.1")), url=url)
    assert in_slices(endpoint_slice(endpoint("10.0.0.1", ready=False)), url=url) == {}
