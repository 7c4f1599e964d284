"""Command lines of kvrouter, read by its own code: containers, Compose services, systemd units."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tests.deploy.checks.manifests import Container, Overlay
from tests.deploy.checks.references import SECRETS

from kvrouter.cli.main import find_command, imported
from kvrouter.cli.run_command import load_settings
from kvrouter.options.complaints import UsageError
from kvrouter.options.option import options
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, check_disk, quotas_of, tokens_of

SAMPLE_OF_SECRETS = {
    "api-keys.yaml": f"sample: sha256:{'0' * 64}\n",
    "tokens": f"default:{'0' * 32}\n",
}
"""Secrets with a form of their own; any other is a token."""


class Refused(Exception):
    """kvrouter does not start with this command line; a sentence."""


@dataclass(frozen=True)
class Loaded:
    """A command line that kvrouter takes."""

    command: str
    settings: Any


def loaded(arguments: Sequence[str], environment: Mapping[str, str]) -> Loaded:
    """What kvrouter makes of it; Refused: it would not start, or would ignore something."""
    command = find_command(list(arguments))
    if command is None:
        raise Refused(f"kvrouter has no command {arguments[:1]}")
    known = {each.env for each in options(imported(command.settings))}
    if unknown := sorted(name for name in environment if name not in known):
        raise Refused(f"kvrouter {command.name} reads no variable {', '.join(unknown)}")
    others = {name: text for name, text in os.environ.items() if not name.startswith("KVROUTER_")}
    with patch.dict(os.environ, {**others, **environment}, clear=True):
        try:
            found = load_settings(command, list(arguments[len(command.name.split()) :]))
        except UsageError as error:
            raise Refused(f"kvrouter {command.name}: {error}") from None
    if found.advice:
        raise Refused(f"kvrouter {command.name}: {' '.join(found.advice)}")
    if isinstance(found.settings, StoreSettings):
        _start_store(found.settings)
    return Loaded(command.name, found.settings)


def _start_store(settings: StoreSettings) -> None:
    try:
        quotas_of(settings, tokens_of(settings))
        check_disk(settings)
    except StartRefused as error:
        raise Refused(f"kvrouter store: {error}") from None


@contextmanager
def in_container(overlay: Overlay, container: Container) -> Iterator[Loaded]:
    """What kvrouter loads in the container, with its mounted files; Refused as in `loaded`."""
    with TemporaryDirectory() as name:
        places = {
            mount["mountPath"]: _mounted(overlay, container, mount["name"], Path(name))
            for mount in container.spec.get("volumeMounts", [])
        }
        expanded = {key: each.get("value", "10.1.2.3") for key, each in container.env.items()}
        expanded["ROLE"] = "decode"
        environment = {
            key: _real(text, expanded, places)
            for key, text in expanded.items()
            if key.startswith("KVROUTER_")
        }
        arguments = [_real(each, expanded, places) for each in container.arguments]
        yield loaded(arguments, environment)


def _mounted(overlay: Overlay, container: Container, volume: str, folder: Path) -> Path:
    """A folder with what the volume holds."""
    place = folder / volume
    place.mkdir()
    for each in container.pod.get("volumes", []):
        if each["name"] != volume:
            continue
        if "configMap" in each:
            for item in overlay.of("ConfigMap"):
                if item["metadata"]["name"] == each["configMap"]["name"]:
                    for key, text in item["data"].items():
                        (place / key).write_text(text)
        for key in SECRETS.get(each.get("secret", {}).get("secretName"), ()):
            (place / key).write_text(SAMPLE_OF_SECRETS.get(key, "0" * 32))
            (place / key).chmod(each["secret"]["defaultMode"])
    return place


def _real(text: str, variables: Mapping[str, str], places: Mapping[str, Path]) -> str:
    """The text with its variables and with the test's folders in place of the container's."""
    text = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], "x"), text)
    folders = "|".join(map(re.escape, places)) or "(?!)"
    return re.sub(rf"(?<![\w/])({folders})(?=/|$)", lambda found: str(places[found[1]]), text)
