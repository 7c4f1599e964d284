"""Check deploy/ as far as that goes without a cluster: `python -m tests.deploy.check`.

Renders every overlay and holds each object to the schemas of Kubernetes, to the Pod Security
Standards and to what kvrouter itself says of its flags, paths, ports and times. The programs that
will read the other files read them here. A program that is missing fails the check; --without NAME
leaves it out, and the last line says so. Exit status: 0 if all holds.
"""

import asyncio
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.deploy.checks import (
    agreements,
    api,
    compose,
    network,
    pod_security,
    probes,
    references,
    scaling,
)
from tests.deploy.checks.manifests import Overlay, overlays, unused_components
from tests.deploy.checks.programs import PROGRAMS
from tests.deploy.checks.running import Absent
from tests.kubernetes.kubectl import NoKubectl

OF_OVERLAY = (api, pod_security, references, network, agreements)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m tests.deploy.check", description=__doc__)
    parser.add_argument("--without", action="append", default=[], choices=PROGRAMS, metavar="NAME")
    without = parser.parse_args(arguments).without
    try:
        every = overlays()
    except (NoKubectl, RuntimeError) as error:
        print(f"deploy-check: {error}")
        return 1
    found = list(of_overlays(every))
    asked = probes.of_envoy().union(*map(probes.of_overlay, every))
    told = [f"{len(every)} overlays", f"{sum(len(each.objects) for each in every)} objects"]
    for name, program in PROGRAMS.items():
        if name in without:
            told.append(f"{name} NOT CHECKED")
            continue
        try:
            checked = program(every)
        except Absent as absent:
            found.append(f"{absent}; --without {name} leaves it out")
            continue
        found += checked.complaints
        told.append(f"{name} {checked.files}")
        if name == "compose" and not checked.complaints:
            asked |= set(compose.probed())
    found += asyncio.run(_ask(asked))
    print(*sorted(found), sep="\n", end="\n" if found else "")
    verdict = f"{len(found)} complaints" if found else "all hold"
    print(f"deploy-check: {', '.join(told)}: {verdict}")
    return 1 if found else 0


def of_overlays(every: Sequence[Overlay]) -> Iterator[str]:
    """What is wrong with the overlays, told without a process but kubectl."""
    yield from unused_components()
    yield from scaling.complaints(every)
    for overlay in every:
        for check in OF_OVERLAY:
            yield from check.complaints(overlay)


async def _ask(asked: set[probes.Asked]) -> list[str]:
    with TemporaryDirectory() as folder:
        return await probes.complaints(asked, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
