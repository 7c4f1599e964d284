"""k8s:// URLs: what each option asks for, and what is refused."""

import pytest

from kvrouter.engines.engine import Role
from kvrouter.membership.kubernetes.engines import read_url


def test_pods_are_found_by_their_labels() -> None:
    wanted = read_url("k8s://models?selector=app=vllm,kvrouter/role!=canary")
    assert (wanted.namespace, wanted.slices) == ("models", False)
    assert wanted.selector == "app=vllm,kvrouter/role!=canary"
    assert (wanted.role, wanted.port, wanted.context) == (None, None, None)


def test_what_the_environment_would_split_is_written_with_percent_signs() -> None:
    wanted = read_url("k8s://models?selector=app%20in%20(vllm%2Csglang)")
    assert wanted.selector == "app in (vllm,sglang)"


def test_a_service_is_found_by_its_name() -> None:
    wanted = read_url("k8s://models?service=vllm-decode&role=decode&port=8001&context=gpu")
    assert wanted.slices
    assert wanted.selector == "kubernetes.io/service-name=vllm-decode"
    assert (wanted.role, wanted.port, wanted.context) == (Role.DECODE, 8001, "gpu")


def test_without_a_namespace_it_is_the_routers_own() -> None:
    assert read_url("k8s://?selector=app=vllm&port=api").namespace == ""


def test_sources_that_differ_in_any_option_have_different_names() -> None:
    urls = ["k8s://a?selector=x", "k8s://b?selector=x", "k8s://a?service=x",
            "k8s://a?selector=x&port=1", "k8s://a?selector=x&role=prefill"]  # fmt: skip
    assert len({read_url(url).name for url in urls}) == len(urls)
    again = "k8s://a?port=1&selector=x"
    assert read_url(again).name == read_url("k8s://a?selector=x&port=1").name


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("k8s://models", "say ?selector=LABELS for Pods, or ?service=NAME for a Service"),
        ("k8s://models?selector=a&service=b", "say ?selector=LABELS for Pods"),
        ("k8s://models?selector=", "give each option once, with a value"),
        ("k8s://models?selector=a&selector=b", "give each option once, with a value"),
        (
            "k8s://models?selector=a&role=draft",
            "say role=prefill or role=decode or role=both",
        ),
        ("k8s://models?selector=a&port=0", "port=0 is neither a port nor the name of one"),
        ("k8s://models?selector=a&port=HTTP", "port=HTTP is neither a port"),
        ("k8s://models?selector=a&interval=5", "no option 'interval'; there are selector, service"),
        ("k8s://models?service=a.b", "'a.b' is no name of a Service"),
        ("k8s://models/pods?selector=a", "give it as k8s://NAMESPACE?selector=LABELS"),
        ("k8s://models:443?selector=a", "give it as k8s://NAMESPACE?selector=LABELS"),
        ("k8s://Models?selector=a", "give it as k8s://NAMESPACE?selector=LABELS"),
    ],
)
def test_a_wrong_url_is_refused_with_the_remedy(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^discovery 'k8s://") as refused:
        read_url(url)
    assert complaint in str(refused.value)
