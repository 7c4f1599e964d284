"""The images of deploy/Dockerfile and deploy/Dockerfile.engine, built and tried."""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from tests.deploy.project import ROOT

ENGINE = "python:3.11-slim-bookworm"
"""Stands for the image of an engine; tests/packaging tries the wheel of other Pythons."""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def docker_run(docker: str, image: str, *words: str, entrypoint: str = "") -> str:
    """What a container of the image prints."""
    entry = ["--entrypoint", entrypoint] if entrypoint else []
    command = [docker, "run", "--rm", *entry, image, *words]
    return subprocess.run(
        command, check=True, timeout=300, stdout=subprocess.PIPE, text=True
    ).stdout


def build(docker: str, tag: str, *words: str) -> str:
    command = [docker, "build", "--quiet", *words, "-t", tag, "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    return tag


@pytest.fixture(scope="module")
def images(docker: str) -> Iterator[None]:
    subprocess.run(["make", "images"], cwd=ROOT, check=True, timeout=900)
    yield
    subprocess.run([docker, "image", "rm", "kvrouter-rdma:local"], check=True)


@pytest.mark.usefixtures("images")
def test_the_image_says_what_it_is_and_how_to_see_that_it_is_well(docker: str) -> None:
    asked = [docker, "image", "inspect", "kvrouter:local"]
    config = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)[0]["Config"]
    named = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    assert docker_run(docker, "kvrouter:local", "--version").split()[1] == named["version"]
    assert re.fullmatch("[0-9a-f]{40}", named["revision"])
    assert (named["title"], named["licenses"]) == ("kvrouter", "Apache-2.0")
    assert config["User"] == "10001"
    assert config["Healthcheck"]["Test"][0] == "CMD"


@pytest.mark.usefixtures("images")
def test_the_image_has_what_options_of_the_router_need(docker: str) -> None:
    wanted = "dns.resolver, opentelemetry.sdk, requests, tokenizers, redis"
    docker_run(docker, "kvrouter:local", "-c", f"import {wanted}", entrypoint="python")


@pytest.mark.usefixtures("images")
def test_the_demo_in_the_image_gets_every_answer_right(docker: str) -> None:
    told = docker_run(docker, "kvrouter:local", "demo")
    assert re.search(r"\b(\d+) of \1 answers complete and right", told), told[-3000:]


@pytest.mark.usefixtures("images")
def test_the_rdma_image_has_pyverbs_of_the_version_of_its_rdma_core(docker: str) -> None:
    code = "import pyverbs.device; print(pyverbs.__name__)"
    assert docker_run(docker, "kvrouter-rdma:local", "-c", code, entrypoint="python") == "pyverbs\n"
    query = ["-W", "-f", "${Version}\n", "python3-pyverbs", "libibverbs1", "ibverbs-providers"]
    versions = docker_run(docker, "kvrouter-rdma:local", *query, entrypoint="dpkg-query")
    assert len(set(versions.split())) == 1
    assert docker_run(docker, "kvrouter-rdma:local", "-u", entrypoint="id") == "10001\n"
    assert "--rdma" in docker_run(docker, "kvrouter-rdma:local", "store", "--help")


def test_an_engine_image_gets_the_connectors_and_nothing_else_changes(docker: str) -> None:
    listing = ["-m", "pip", "list", "--format", "json"]
    before = docker_run(docker, ENGINE, *listing, entrypoint="python3")
    bases = ["--build-arg", f"BASE={ENGINE}", "--build-arg", f"BUILDER={ENGINE}"]
    tag = build(docker, "kvrouter-engine:test", "-f", "deploy/Dockerfile.engine", *bases)
    after = docker_run(docker, tag, *listing, entrypoint="python3")
    added = [each["name"] for each in json.loads(after) if each not in json.loads(before)]
    assert added == ["kvrouter-store"]
    docker_run(docker, tag, "-c", "import kvrouter_store._core", entrypoint="python3")
