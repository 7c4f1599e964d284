"""Hosts on one machine: network namespaces, joined by a bridge.

They are in a network namespace of the drill's own, with its own mounts and process ids: drills do
not see each other. The kernel removes everything in there when the drill ends, however that is.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

HUB = "10.0.0.1"
"""Address of what is on none of the hosts."""
DRILL_FOLDER = Path("/run/drill")
"""A folder that goes with the drill."""
_OWN = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork"]
_OWN += ["--kill-child", "--mount-proc"]
_SOCKETS = Path("/run/sockets")


class NoHosts(Exception):
    """Hosts cannot be made here; one sentence with the remedy."""


def own_namespaces() -> list[str]:
    """What a command begins with that runs in namespaces of its own, and is killed with its parent.

    Raises NoHosts.
    """
    own = _OWN if os.geteuid() == 0 else [*_OWN, "--map-root-user"]
    try:
        done = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoHosts("there is no unshare: run it on Linux, with util-linux") from None
    if done.returncode:
        why = done.stderr.strip()
        raise NoHosts(f"network namespaces cannot be made here ({why}): run it as root")
    return own


@dataclass(frozen=True)
class Host:
    """A host: the name of its namespace, and its address."""

    name: str
    address: str

    def within(self, *command: str) -> tuple[str, ...]:
        """The command that runs another one on this host.

        Unix sockets reach through network namespaces, so each host has its own folder for them.
        """
        own = ("sh", "-c", f'mount --bind {_SOCKETS}-{self.name} {_SOCKETS} && exec "$@"', "sh")
        return ("ip", "netns", "exec", self.name, *own, *command)

    @property
    def socket(self) -> str:
        """The Unix socket of its node, which no other host finds."""
        return str(_SOCKETS / f"{self.name}.sock")


class Network:
    """Hosts a, b, c and so on, on a bridge with the hub. To be made in namespaces of one's own."""

    def __init__(self, hosts: int) -> None:
        self.hosts = [Host(chr(ord("a") + k), f"10.0.0.{k + 11}") for k in range(hosts)]
        _run("mount -t tmpfs tmpfs /run")
        _SOCKETS.mkdir()
        DRILL_FOLDER.mkdir()
        _run("ip link set dev lo up")
        _run("ip link add name hub type bridge")
        _run(f"ip address add {HUB}/24 dev hub")
        _run("ip link set dev hub up")
        for host in self.hosts:
            self._add(host)

    def cut(self, host: Host) -> None:
        """Pull the cable: nothing comes or goes, and no connection ends."""
        _run(f"ip link set dev {host.name} down")

    def join(self, host: Host) -> None:
        """Plug it in again."""
        _run(f"ip link set dev {host.name} up")

    def _add(self, host: Host) -> None:
        Path(f"{_SOCKETS}-{host.name}").mkdir()
        _run(f"ip netns add {host.name}")
        _run(f"ip link add name {host.name} type veth peer name eth0 netns {host.name}")
        _run(f"ip link set dev {host.name} master hub up")
        _run(f"ip -n {host.name} address add {host.address}/24 dev eth0")
        _run(f"ip -n {host.name} link set dev eth0 up")
        _run(f"ip -n {host.name} link set dev lo up")


def _run(words: str) -> None:
    done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"hosts cannot be made here: {words!r} says {done.stderr.strip()!r}")
