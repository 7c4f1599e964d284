"""Files that other programs read, given to those programs."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from tests.deploy.checks import compose
from tests.deploy.checks.agreements import drain_s, late
from tests.deploy.checks.commands import Refused, loaded
from tests.deploy.checks.manifests import DEPLOY, ROOT, Json, Overlay
from tests.deploy.checks.running import Absent, Checked, found, ran
from tests.fakes.envoy import MISSING as NO_ENVOY
from tests.fakes.envoy import envoy_program
from tests.fakes.haproxy import MISSING as NO_HAPROXY
from tests.fakes.haproxy import configured as haproxy_file
from tests.fakes.haproxy import haproxy_program
from tests.fakes.nginx import MISSING as NO_NGINX
from tests.fakes.nginx import configured, nginx_program

EXPOSURE = 25
"""The worst score that `systemd-analyze security` may give a unit, in tenths."""


def promtool(overlays: Sequence[Overlay]) -> Checked:
    """Prometheus' own files, rules inside objects, and queries of scalers."""
    program = found("promtool", "apt-get install prometheus")
    kinds = {"prometheus.yml": ("check", "config"), "_test.yml": ("test", "rules")}
    kinds["rules.yml"] = ("check", "rules")
    said = []
    folder = DEPLOY / "prometheus"
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    for path in files:
        kind = next((words for end, words in kinds.items() if path.name.endswith(end)), None)
        if kind is None:
            said.append(f"{path.relative_to(ROOT)}: promtool has no check for it")
        else:
            said += ran(program, *kind, path)
    rules = list(_rules(overlays))
    with TemporaryDirectory() as name:
        for number, (where, groups) in enumerate(rules):
            path = Path(name) / f"{number}.yml"
            path.write_text(yaml.safe_dump({"groups": groups}))
            said += [f"{where}: {each}" for each in ran(program, "check", "rules", path)]
    return Checked(len(files) + len(rules), said)


def _rules(overlays: Sequence[Overlay]) -> Iterator[tuple[str, list[Json]]]:
    """Groups of rules in objects; a query of a scaler counts as one."""
    for overlay in overlays:
        for each in overlay.of("PrometheusRule"):
            yield overlay.title(each), each["spec"]["groups"]
        for each in overlay.of("ScaledObject"):
            queries = [trigger["metadata"]["query"] for trigger in each["spec"]["triggers"]]
            rules = [{"record": "scaler", "expr": query} for query in queries]
            yield overlay.title(each), [{"name": "scaler", "rules": rules}]


def nginx(_: Sequence[Overlay]) -> Checked:
    program = nginx_program()
    if program is None:
        raise Absent(NO_NGINX)
    with TemporaryDirectory() as name:
        path = configured(Path(name), (8000, 8001), 8080)
        return Checked(1, ran(program, "-t", "-e", "stderr", "-p", name, "-c", path))


def envoy(_: Sequence[Overlay]) -> Checked:
    program = envoy_program()
    if program is None:
        raise Absent(NO_ENVOY)
    return Checked(1, ran(program, "--mode", "validate", "-c", DEPLOY / "envoy.yaml"))


def haproxy(_: Sequence[Overlay]) -> Checked:
    program = haproxy_program()
    if program is None:
        raise Absent(NO_HAPROXY)
    with TemporaryDirectory() as name:
        path = haproxy_file(Path(name), (8000, 8001), 8080)
        return Checked(1, ran(program, "-c", "-f", path))


def systemd(_: Sequence[Overlay]) -> Checked:
    """Units as systemd reads them, their command lines, and the time to stop."""
    program = found("systemd-analyze", "apt-get install systemd")
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    said = []
    with TemporaryDirectory() as name:
        for unit in units:
            path = Path(name) / unit.name
            # systemd looks for the program, which is not installed there.
            path.write_text(unit.read_text().replace("/opt/kvrouter/bin/kvrouter", sys.executable))
            said += ran(program, "verify", "--man=no", path, silent=True)
            offline = ("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE}")
            said += ran(program, *offline, path)
            said += [f"{unit.name}: {each}" for each in _service(unit, Path(name))]
    return Checked(len(units), said)


def _service(unit: Path, folder: Path) -> Iterator[str]:
    said = dict(re.findall(r"^(ExecStart|TimeoutStopSec)=(.+)$", unit.read_text(), re.MULTILINE))
    arguments = said["ExecStart"].split()[1:]
    config = Path(arguments[-1])
    text = (DEPLOY / "systemd" / config.name).read_text()
    tokens = folder / "tokens"
    tokens.write_text(f"default:{'0' * 32}\n")
    tokens.chmod(0o640)
    (folder / config.name).write_text(text.replace("/etc/kvrouter/store-tokens", str(tokens)))
    try:
        command = loaded([*arguments[:-1], str(folder / config.name)], {})
    except Refused as error:
        yield str(error)
        return
    yield from late(float(said["TimeoutStopSec"]), drain_s(command))


PROGRAMS: dict[str, Callable[[Sequence[Overlay]], Checked]] = {
    "promtool": promtool,
    "nginx": nginx,
    "envoy": envoy,
    "haproxy": haproxy,
    "compose": compose.check,
    "systemd": systemd,
}
