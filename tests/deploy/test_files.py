"""What deploy/ promises, read from its files: no engine needed."""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvrouter.cli.main import COMMANDS
from kvrouter.cli.run_command import load_settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


Service = dict[str, Any]


def extended(service: Service) -> Service:
    """The service with what it inherits, as Compose merges it: keys of mappings, items of lists."""
    if "extends" not in service:
        return service
    place = service["extends"]
    bases = yaml.safe_load((DEPLOY / place.get("file", "docker-compose.base.yml")).read_text())
    merged = extended(bases["services"][place["service"]])
    for key, value in service.items():
        if isinstance(value, dict) and key in merged:
            merged[key] = merged[key] | value
        elif isinstance(value, list) and key in merged:
            merged[key] = merged[key] + value
        else:
            merged[key] = value
    return merged


def services_of(file: str) -> dict[str, Service]:
    project = yaml.safe_load((DEPLOY / file).read_text())
    return {name: extended(service) for name, service in project["services"].items()}


@pytest.fixture(scope="module")
def every() -> dict[str, Service]:
    return services_of("docker-compose.yml")


@pytest.fixture(scope="module")
def services(every: dict[str, Service]) -> dict[str, Service]:
    """What starts without a profile."""
    return {name: service for name, service in every.items() if "profiles" not in service}


def ours(services: dict[str, Service]) -> dict[str, Service]:
    """Those that run kvrouter."""
    return {name: each for name, each in services.items() if each["image"] == "kvrouter:local"}


def locked() -> dict[str, str]:
    """The versions in the lock file."""
    text = (DEPLOY / "requirements.lock").read_text()
    return dict(re.findall(r"^([^\s=]+)==(\S+)", text, re.MULTILINE))


def words(command: str | list[str]) -> list[str]:
    return command.split() if isinstance(command, str) else command


def settings_of(service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that the service's process takes."""
    name, *flags = words(service["command"])
    with monkeypatch.context() as patch:
        for variable, value in service.get("environment", {}).items():
            patch.setenv(variable, value.replace("${STORE_MEMORY:-8GiB}", "8GiB"))
        command = next(each for each in COMMANDS if each.name == name)
        return load_settings(command, flags).settings


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.engines.yml"])
def test_every_command_line_is_one_that_kvrouter_takes_and_may_drain_before_it_is_killed(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in ours(services_of(file)).values():
        settings = settings_of(service, monkeypatch)
        assert settings.host == "0.0.0.0"
        drains = [getattr(settings, name, 0) for name in ("drain_timeout_s", "drain_timeout")]
        assert float(service["stop_grace_period"].removesuffix("s")) >= max(drains) + 5


def test_a_process_is_asked_for_its_health_where_it_listens(
    every: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    default = re.search(r"HEALTH_URL=(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert default is not None
    for service in ours(every).values():
        url = urlsplit(service.get("environment", {}).get("HEALTH_URL", default[1]))
        settings = settings_of(service, monkeypatch)
        assert url.port == getattr(settings, "http_port", settings.port)


def test_every_container_is_locked_and_started_again_after_a_crash(
    every: dict[str, Service],
) -> None:
    for service in every.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["restart"] == "unless-stopped"


def test_the_router_waits_for_everything_it_needs(services: dict[str, dict[str, Any]]) -> None:
    healthy = {"condition": "service_healthy"}
    others = {name for name in services if name != "router"}
    assert services["router"]["depends_on"] == dict.fromkeys(others, healthy)
    for engine in others - {"store"}:
        assert services[engine]["depends_on"] == {"store": healthy}


def test_only_what_users_open_is_published_and_only_on_loopback(
    every: dict[str, Service],
) -> None:
    published = {name: service["ports"] for name, service in every.items() if "ports" in service}
    assert set(published) == {"router", "nginx", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


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


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.lock")), ids=lambda path: path.name)
def test_every_locked_version_has_a_hash(path: Path) -> None:
    entries = re.split(r"^(?=\S+==)", path.read_text(), flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        assert "--hash=sha256:" in entry


LOCKED = ("--require-hashes", "--no-index", "--no-deps")


def test_images_install_what_lock_files_say_and_nothing_else() -> None:
    installs = [
        line
        for file in ("Dockerfile", "Dockerfile.engine")
        for line in (DEPLOY / file).read_text().splitlines()
        if "pip install" in line
    ]
    assert len(installs) > 3
    assert all(any(way in line for way in LOCKED) for line in installs), installs


def test_the_image_runs_as_somebody_who_is_not_root_and_pulls_no_frontend() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert not any(line.startswith("# syntax") for line in lines)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["10001", "0", "10001"]  # root installs what RDMA needs
