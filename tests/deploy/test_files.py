"""What deploy/ promises, read from its files: no engine needed."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvrouter.cli.main import COMMANDS
from kvrouter.cli.run_command import load_settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    project: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    assert project["name"] == "kvrouter"
    found: dict[str, dict[str, Any]] = project["services"]
    return found


def locked() -> dict[str, str]:
    """The versions in the lock file."""
    text = (DEPLOY / "requirements.lock").read_text()
    return dict(re.findall(r"^([^\s=]+)==(\S+)", text, re.MULTILINE))


def words(command: str | list[str]) -> list[str]:
    return command.split() if isinstance(command, str) else command


def test_every_command_line_is_one_that_kvrouter_takes(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            monkeypatch.setenv(name, value)
        name, *flags = words(service["command"])
        command = next(each for each in COMMANDS if each.name == name)
        assert load_settings(command, flags).settings.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("name", "field"), [("router", "drain_timeout_s"), ("store", "drain_timeout")]
)
def test_a_service_may_drain_before_it_is_killed(
    services: dict[str, dict[str, Any]], name: str, field: str
) -> None:
    service = services[name]
    command_name, *flags = words(service["command"])
    command = next(each for each in COMMANDS if each.name == command_name)
    settings = load_settings(command, flags).settings
    assert float(service["stop_grace_period"].removesuffix("s")) >= getattr(settings, field) + 5


def test_the_router_waits_for_everything_it_needs(services: dict[str, dict[str, Any]]) -> None:
    healthy = {"condition": "service_healthy"}
    others = {name for name in services if name != "router"}
    assert services["router"]["depends_on"] == dict.fromkeys(others, healthy)
    for engine in others - {"store"}:
        assert services[engine]["depends_on"] == {"store": healthy}


def test_only_the_router_is_published_and_only_on_loopback(
    services: dict[str, dict[str, Any]],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"router"}
    assert all(port.startswith("127.0.0.1:") for port in published["router"])
    assert all(port.endswith(":8000") for port in published["router"])


def test_engines_advertise_the_address_that_the_router_is_given(
    services: dict[str, dict[str, Any]],
) -> None:
    flags = words(services["router"]["command"])
    told = {word for word in flags if word.startswith(("prefill-", "decode-"))}
    advertised = {
        service["environment"]["KVROUTER_SIM_ADVERTISE"]
        for name, service in services.items()
        if name.startswith(("prefill", "decode"))
    }
    assert told == advertised


def test_the_lock_file_has_a_version_in_range_for_every_extra_that_needs_no_hardware() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    wanted += [each for name in extras.keys() - {"dev", "rdma"} for each in extras[name]]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked()[canonicalize_name(requirement.name)])
    text = (DEPLOY / "requirements.lock").read_text()
    assert text.count("kvrouter (pyproject.toml)") == len(wanted), "run make lock"


def test_every_locked_version_has_a_hash() -> None:
    text = (DEPLOY / "requirements.lock").read_text()
    assert locked()
    for entry in re.split(r"^(?=\S+==)", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry


def test_the_image_installs_what_the_lock_file_says_and_nothing_else() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    installs = [line for line in lines if "/opt/venv/bin/pip install" in line]
    assert len(installs) == 2
    assert "--require-hashes -r /requirements.lock" in installs[0]
    assert "--no-deps /dist/*.whl" in installs[1]


def test_the_image_runs_as_somebody_who_is_not_root_and_pulls_no_frontend() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert not any(line.startswith("# syntax") for line in lines)
    last_stage = lines[max(at for at, line in enumerate(lines) if line.startswith("FROM")) :]
    users = [line.split()[1] for line in last_stage if line.startswith("USER")]
    assert users == ["10001"]
