"""What an emulated machine boots: Debian's kernel with Soft-RoCE, and the packages laid over the
host's root. Made once and kept outside the checkout, under a key of what it is made from.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Image", "NoMachine", "archive", "image", "say"]

HERE = Path(__file__).resolve().parent
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "xz": "xz-utils",
    "ip": "iproute2",
}
# Unpacked for the machine, not installed on the host.
PACKAGES = (
    "python3-pyverbs",
    "libibverbs1",
    "ibverbs-providers",
    "librdmacm1",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpython3.11",
    "ibverbs-utils",
    "perftest",
    "libibumad3",
    "libpci3",
)
# rdma_rxe asks for crc32 by name when a device is made, which an initramfs without it cannot load.
MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_net",
    "virtio_console",
    "virtio_rng",
    "crc32_generic",
    "crc32_pclmul",
    "rdma_rxe",
    "rdma_ucm",
)
XZ_MAGIC = b"\xfd7zXZ\x00"


class NoMachine(Exception):
    """No machine can be made here; the message says why, and what to do about it."""


class Image:
    """What was made: `kernel`, `initramfs`, and the tree of `packages`."""

    def __init__(self, folder: Path) -> None:
        self.kernel = folder / "vmlinux"
        self.initramfs = folder / "initramfs.cpio"
        self.packages = folder / "packages"
        self.complete = folder / "complete"

    @property
    def python_path(self) -> Path:
        """Holds Debian's pyverbs and nothing else."""
        return self.packages / "usr/lib/python3/dist-packages"

    @property
    def libraries(self) -> Path:
        """Holds what pyverbs is linked with, for a host that has not installed it."""
        return self.packages / "usr/lib/x86_64-linux-gnu"


def image() -> Image:
    """The image; made where it is missing, which takes half a minute and 100 MB.

    As root it installs the Debian packages that it needs, and says so. Raises NoMachine.
    """
    _check_host()
    kernel = _kernel_package()
    cache = Path(os.environ.get("KVROUTER_TEST_CACHE", "~/.cache/kvrouter-tests")).expanduser()
    made_from = [kernel, *PACKAGES, *MODULES, (HERE / "guest_init.sh").read_text()]
    key = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:16]
    folder = cache / f"rdma-machine-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "rdma-machine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Image(folder)
        if not made.complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            say(f"making the machine's image from {kernel} in {folder}")
            _make(made, kernel, folder / "making")
            made.complete.touch()
    return made


def say(text: str) -> None:
    """One line of progress, apart from the command's own output."""
    print(f"rdma-machine: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run to the end and return what it printed. Raises NoMachine with its last lines."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-8:])
        raise NoMachine(f"{command[0]} ended with {done.returncode}:\n{tail}")
    return done.stdout


def _check_host() -> None:
    if platform.machine() != "x86_64" or not shutil.which("apt-get"):
        raise NoMachine("the emulated machine is made from Debian's packages for x86_64")
    if sys.version_info[:2] != (3, 11):
        raise NoMachine("Debian's python3-pyverbs is built for Python 3.11: use that one")
    missing = sorted(package for tool, package in TOOLS.items() if not _found(tool))
    if not missing:
        return
    if os.geteuid() != 0:
        raise NoMachine(f"install the Debian packages {' '.join(missing)}, or run this as root")
    say(f"installing Debian packages: {' '.join(missing)}")
    run("apt-get", "update")
    run("apt-get", "install", "-y", "--no-install-recommends", *missing)


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _kernel_package() -> str:
    """The package that Debian's current kernel is in, by its full name."""
    for attempt in range(2):
        found = re.search(
            r"Depends: (linux-image-\S+)", run("apt-cache", "depends", "linux-image-amd64")
        )
        if found:
            return found[1]
        if attempt == 0 and os.geteuid() == 0:
            run("apt-get", "update")
    raise NoMachine("apt knows no linux-image-amd64: run apt-get update")


def _make(made: Image, kernel: str, folder: Path) -> None:
    folder.mkdir()
    unpacked = folder / "kernel"
    _unpack([kernel], unpacked)
    _unpack(PACKAGES, made.packages)
    version = kernel.removeprefix("linux-image-")
    made.kernel.write_bytes(_uncompressed(unpacked / "boot" / f"vmlinuz-{version}"))
    root = folder / "initramfs"
    (root / "bin").mkdir(parents=True)
    shutil.copy(_found("busybox") or "", root / "bin/busybox")
    shutil.copy(HERE / "guest_init.sh", root / "init")
    (root / "init").chmod(0o755)
    _copy_modules(unpacked, version, root / "modules")
    made.initramfs.write_bytes(archive(root))
    shutil.rmtree(folder)


def _unpack(packages: Sequence[str], folder: Path) -> None:
    """Download the packages and unpack them into one tree, in which /lib is /usr/lib."""
    folder.mkdir()
    run("apt-get", "download", "-q", *packages, cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg-deb", "-x", package, folder)
        package.unlink()
    if packages is PACKAGES and (folder / "lib").is_dir():
        shutil.copytree(folder / "lib", folder / "usr/lib", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder / "lib")


def _copy_modules(unpacked: Path, version: str, target: Path) -> None:
    """The modules and what they need, and `order`, in which they are to be loaded."""
    modprobe = _found("modprobe") or "modprobe"
    run(_found("depmod") or "depmod", "-b", unpacked, version)
    order: list[Path] = []
    for module in MODULES:
        shown = run(modprobe, "-d", unpacked, "-S", version, "--show-depends", module)
        paths = [Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod")]
        order.extend(path for path in paths if path not in order)
    target.mkdir()
    for path in order:
        shutil.copy(path, target / path.name)
    (target / "order").write_text("".join(f"{path.name}\n" for path in order))


def _uncompressed(image_file: Path) -> bytes:
    """The kernel out of its compressed image: unpacking that in emulation takes seconds."""
    packed = image_file.read_bytes()
    start = packed.find(XZ_MAGIC)
    done = subprocess.run(
        ["xz", "-dc", "--single-stream"], input=packed[start:], capture_output=True, check=False
    )
    if not done.stdout.startswith(b"\x7fELF"):
        raise NoMachine(f"{image_file.name} holds no kernel packed with xz")
    return done.stdout


def archive(root: Path) -> bytes:
    """The tree as a kernel reads it before there is a disk. Archives may follow one another."""
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    done = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"],
        cwd=root,
        input=names.encode(),
        capture_output=True,
        check=True,
    )
    return done.stdout
