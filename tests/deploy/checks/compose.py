"""Compose files as Compose resolves them, with all of their profiles."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import yaml
from tests.deploy.checks.agreements import drain_s, late
from tests.deploy.checks.commands import Refused, loaded
from tests.deploy.checks.manifests import DEPLOY, Json, Overlay
from tests.deploy.checks.running import Checked, found

OUR_IMAGE = "kvrouter:"


def check(_: Sequence[Overlay]) -> Checked:
    """What Compose and kvrouter say against the files; Absent: there is no Compose."""
    files = sorted(DEPLOY.glob("docker-compose*.yml"))
    said = []
    for path in files:
        try:
            services = _services(path)
        except Refused as error:
            said.append(f"{path.name}: {error}")
            continue
        for name, service in services.items():
            said += [f"{path.name}: {name}: {each}" for each in _wrong(service)]
    return Checked(len(files), said)


def probed() -> Iterator[tuple[str, str, str]]:
    """Services that run kvrouter, their command, and the paths that their health checks ask."""
    for path in DEPLOY.glob("docker-compose*.yml"):
        for name, service in _services(path).items():
            for asked in re.findall(r"http://127\.0\.0\.1:\d+(/\w+)", json.dumps(service)):
                yield f"{path.name}: {name}", service["command"][0], asked


@cache
def _services(path: Path) -> Json:
    """The services that run kvrouter; Refused: Compose refuses the file.

    A file without a name is no project: others must extend it, and Compose reads it with them.
    """
    program = found("docker-compose", "Compose v2; .ci/stages/deploy.sh brings it")
    if "name" not in yaml.safe_load(path.read_text()):
        others = (each.read_text() for each in DEPLOY.glob("docker-compose*.yml"))
        if not any(f"file: {path.name}" in text for text in others):
            raise Refused("it has no name, and no file extends it")
        return {}
    done = subprocess.run(
        [program, "--profile", "*", "-f", path, "config", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MODEL": "m"},
    )
    if done.returncode or done.stderr:
        raise Refused(done.stderr.strip())
    services: Json = json.loads(done.stdout)["services"]
    return {name: each for name, each in services.items() if each["image"].startswith(OUR_IMAGE)}


def _wrong(service: Json) -> Iterator[str]:
    variables = service.get("environment") or {}
    ours = {name: text for name, text in variables.items() if name.startswith("KVROUTER_")}
    try:
        command = loaded(service["command"], ours)
    except Refused as error:
        yield str(error)
        return
    given_s = float(service["stop_grace_period"].removesuffix("s"))
    yield from late(given_s, drain_s(command))
