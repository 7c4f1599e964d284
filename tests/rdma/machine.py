"""machine.py [--beside COMMAND] [--limit S] COMMAND...: run it in an emulated machine with RDMA.

The machine boots in five seconds: QEMU without KVM, Debian's kernel, a Soft-RoCE device rxe0. Its
root is this host's, read-only under an overlay in its memory: the same Python, packages and
checkout, nothing written back. With --beside a second machine runs that command, joined to the
first by a virtual Ethernet, and ends with it. 10.77.0.1 and 10.77.0.2 are their addresses there;
the host's network has no part in it. A second device, rxe1, is joined to nothing.

Exit status: the command's; 124 over the limit; 97 where no machine can be made.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.rdma.machine_image import HERE, Image, NoMachine, archive, image, say

__all__ = ["NO_MACHINE", "Job", "end_on_sigterm", "run_machines"]

NO_MACHINE = 97
NO_STATUS = 125
OVER_LIMIT = 124
BOOT_S = 60
KERNEL = (
    "console=ttyS0 quiet panic=-1 net.ifnames=0 mitigations=off random.trust_cpu=on audit=0 "
    "nokaslr clocksource=hpet no_timer_check cryptomgr.notests clearcpuid=rep_good"
)
# An emulator repeats string instructions byte by byte: neither libc nor the kernel is to use them.
CPU = "max,-erms"
SHARE = "security_model=none,multidevs=remap"


@dataclass(frozen=True)
class Job:
    """What one machine runs, where, and with which variables set."""

    command: Sequence[str]
    folder: Path
    environment: dict[str, str]
    memory: str = "1536M"
    cpus: int = 2


class Machine:
    """A machine that runs a job. Its output goes to ours, line by line, marked where there are two.

    Owned by run_machines, which ends it whatever happens.
    """

    def __init__(
        self, made: Image, job: Job, *, node: int, nodes: int, work: Path, limit_s: float
    ) -> None:
        self.result = work / f"result{node}"
        self.console = work / f"console{node}"
        self.result.mkdir()
        initramfs = work / f"initramfs{node}"
        _write_job(work / f"job{node}", made, job, node, limit_s)
        initramfs.write_bytes(made.initramfs.read_bytes() + archive(work / f"job{node}"))
        command = [
            *(
                "qemu-system-x86_64",
                "-M",
                "pc,usb=off,vmport=off",
                "-nodefaults",
                "-no-user-config",
            ),
            *("-no-reboot", "-display", "none", "-m", job.memory, "-smp", str(job.cpus)),
            *("-accel", "tcg,thread=multi,tb-size=512", "-cpu", CPU),
            *("-kernel", str(made.kernel), "-initrd", str(initramfs), "-append", KERNEL),
            *("-serial", f"file:{self.console}", "-device", "virtio-rng-pci"),
            *("-device", "virtio-serial-pci", "-chardev", "file,id=out,path=/dev/stdout"),
            *("-device", "virtserialport,chardev=out,name=out"),
            *("-fsdev", f"local,id=root,path=/,readonly=on,{SHARE}"),
            *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
            *("-fsdev", f"local,id=packages,path={made.packages},readonly=on,{SHARE}"),
            *("-device", "virtio-9p-pci,fsdev=packages,mount_tag=packages"),
            *("-fsdev", f"local,id=result,path={self.result},{SHARE}"),
            *("-device", "virtio-9p-pci,fsdev=result,mount_tag=result"),
            *("-netdev", _network(work, node, nodes)),
            *("-device", f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:0{node + 1},romfile="),
            *("-netdev", "hubport,id=alone,hubid=1"),
            *("-device", f"virtio-net-pci,netdev=alone,mac=52:54:00:78:00:0{node + 1},romfile="),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.process.stdout is not None
        mark = f"[{node}] " if nodes > 1 else ""
        self._follow = threading.Thread(target=_follow, args=(self.process.stdout, mark))
        self._follow.start()

    def status(self, limit_s: float) -> int:
        """The command's exit status when the machine has ended; OVER_LIMIT if it does not."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return OVER_LIMIT
        with contextlib.suppress(OSError, ValueError):
            return int((self.result / "status").read_text())
        say("the machine gave no status; the end of its console:")
        print(self.console.read_text(errors="replace")[-4000:], file=sys.stderr)
        return NO_STATUS

    def end(self) -> None:
        """Take its power away."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._follow.join()


def run_machines(jobs: Sequence[Job], limit_s: float) -> int:
    """Run the jobs, each in a machine of its own; the first one's exit status, when it has ended.

    The others end with it. Raises NoMachine.
    """
    made = image()
    started = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rdma-machine-"))
        machines: list[Machine] = []
        for node, job in enumerate(jobs):
            machine = Machine(
                made, job, node=node, nodes=len(jobs), work=Path(folder), limit_s=limit_s
            )
            cleanup.callback(machine.end)
            machines.append(machine)
        status = machines[0].status(limit_s + BOOT_S)
    say(f"status {status} after {time.monotonic() - started:.1f} s")
    return status


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: with its machines, and without their files."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _write_job(folder: Path, made: Image, job: Job, node: int, limit_s: float) -> None:
    inner = folder / "job"
    inner.mkdir(parents=True)
    settings = {
        "NODE": str(node),
        "FOLDER": str(job.folder),
        "LIMIT": str(round(limit_s)),
    }
    (inner / "settings").write_text(
        "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    )
    (inner / "start.sh").write_text((HERE / "guest_start.sh").read_text())
    paths = filter(None, [str(made.python_path), job.environment.get("PYTHONPATH")])
    exports = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    (inner / "command.sh").write_text(
        "".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in (job.environment | exports).items()
        )
        + f"exec {shlex.join(job.command)}\n"
    )


def _network(work: Path, node: int, nodes: int) -> str:
    """Datagrams over Unix sockets: QEMU's stream between machines stalls for 40 ms at a time."""
    if nodes == 1:
        return "hubport,id=net,hubid=0"
    return (
        f"dgram,id=net,local.type=unix,local.path={work}/net{node},"
        f"remote.type=unix,remote.path={work}/net{1 - node}"
    )


def _follow(output: IO[bytes], mark: str) -> None:
    for line in output:
        text = line.decode(errors="replace").rstrip()
        if "is not connected to host network" not in text:
            print(f"{mark}{text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", help="run this in a second machine beside the first")
    parser.add_argument("--limit", type=float, default=300, help="seconds that it may take")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    commands = [command or ["true"], *([["sh", "-c", given.beside]] if given.beside else [])]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        return run_machines(
            [Job(command, Path.cwd(), environment) for command in commands], given.limit
        )
    except NoMachine as problem:
        say(str(problem))
        return NO_MACHINE


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
