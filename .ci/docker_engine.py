"""docker_engine.py COMMAND...: run it with a Docker engine, a private one where none answers.

Needs Debian and root only for the private one. It installs the Debian packages mmdebstrap, runc and
iptables where they are missing, and unpacks (does not install) Debian's docker.io, docker-cli,
docker-compose, docker-buildx and containerd into a cache. No registry is asked: BASE_IMAGES and
SERVICE_IMAGES are made of Debian's own packages, with this machine's apt sources and certificates.
Whatever was started is stopped and removed. Exit status: the command's, or 97.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

ENGINE_SUITE = "trixie"  # the first Debian whose packages have compose v2 and buildx
ENGINE_PACKAGES = ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "containerd")
BASE_IMAGES = {"bookworm": "python:3.11-slim-bookworm", "trixie": "python:3.13-slim-trixie"}
BASE_PACKAGES = "python3,python3-dev,python3-venv,python3-pip,ca-certificates"
SERVICE_PACKAGES = "redis-server,nginx,prometheus"
SERVICE_IMAGES = {
    "redis:7-bookworm": ['CMD ["redis-server"]'],
    "nginx:1.28-bookworm": ['CMD ["nginx", "-g", "daemon off;"]'],
    "prom/prometheus:v3.5.0": ['ENTRYPOINT ["/usr/bin/prometheus"]', "USER nobody"],
}
TOOLS = {"mmdebstrap": "mmdebstrap", "runc": "runc", "iptables": "iptables"}
CERTIFICATES = Path("/usr/local/share/ca-certificates")
APT_LOCK = Path(__file__).resolve().parent.parent / "build/ci/apt.lock"
NO_ENGINE = 97
START_S = 60
STOP_S = 30

BASE_SETUP = """set -e
root=$1
cp "$2"/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
chroot "$root" update-ca-certificates >/dev/null
printf '[global]\\ncert = /etc/ssl/certs/ca-certificates.crt\\n' > "$root/etc/pip.conf"
ln -s /usr/bin/python3 "$root/usr/local/bin/python"
ln -s /usr/bin/python3 "$root/usr/local/bin/python3"
"""

SERVICE_SETUP = """set -e
root=$1
install -d -o 65534 -g 65534 "$root/prometheus"
rm -r "$root/etc/prometheus" && mkdir "$root/etc/prometheus"
ln -sf /dev/stderr "$root/var/log/nginx/error.log"
printf '%s\n' 'pid /run/nginx.pid;' 'events {}' 'http {' 'access_log off;' \
  'client_body_temp_path /var/cache/nginx/body;' 'proxy_temp_path /var/cache/nginx/proxy;' \
  'fastcgi_temp_path /var/cache/nginx/fastcgi;' 'uwsgi_temp_path /var/cache/nginx/uwsgi;' \
  'scgi_temp_path /var/cache/nginx/scgi;' 'include /etc/nginx/conf.d/*.conf;' '}' \
  > "$root/etc/nginx/nginx.conf"
mkdir -p "$root/var/cache/nginx"
"""


class NoEngine(Exception):
    """No engine could be started; the message says why."""


def say(text: str) -> None:
    """One line of progress, apart from the command's own output."""
    print(f"docker-engine: {text}", file=sys.stderr, flush=True)


def quietly(command: Sequence[str | Path], *, cwd: Path | None = None) -> str:
    """Run to the end and return what it printed; NoEngine with its last lines where it failed."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-8:])
        raise NoEngine(f"{command[0]} ended with {done.returncode}:\n{tail}")
    return done.stdout


def mirror() -> str:
    """The Debian mirror that this machine's apt uses."""
    listed = quietly(["apt-get", "indextargets", "--format", "$(REPO_URI)"])
    mirrors = [uri for uri in listed.split() if uri.rstrip("/").endswith("debian")]
    if not mirrors:
        raise NoEngine("apt knows no Debian mirror (see apt-get indextargets)")
    return mirrors[0]


def install_tools() -> None:
    """Install the Debian packages that making an image and running a container need."""
    missing = [package for tool, package in TOOLS.items() if not shutil.which(tool)]
    if not missing:
        return
    say(f"installing Debian packages: {' '.join(missing)}")
    APT_LOCK.parent.mkdir(parents=True, exist_ok=True)
    with APT_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # .ci/prepare/*.sh install packages at the same time
        quietly(["apt-get", "update"])
        quietly(["apt-get", "install", "-y", "--no-install-recommends", *missing])


def unpacked_engine(cache: Path) -> Path:
    """A folder with the engine's packages unpacked; fetched once, also where several ask."""
    root = cache / f"engine-{ENGINE_SUITE}"
    with (cache / "engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            unpack_engine(cache, root)
    return root


def unpack_engine(cache: Path, root: Path) -> None:
    """Fetch and unpack the engine's packages to `root`."""
    say(f"fetching Debian's {', '.join(ENGINE_PACKAGES)} from {ENGINE_SUITE}")
    with tempfile.TemporaryDirectory(dir=cache) as name:
        work = Path(name)
        for folder in ("lists/partial", "archives/partial", "debs", "root"):
            (work / folder).mkdir(parents=True)
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        source = work / "suite.list"
        source.write_text(f"deb [signed-by={keyring}] {mirror()} {ENGINE_SUITE} main\n")
        settings = {
            "Dir::Etc::sourcelist": source,
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": work / "lists",
            "Dir::Cache::archives": work / "archives",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "APT::Sandbox::User": "root",
        }
        options = [f"-o{key}={value}" for key, value in settings.items()]
        quietly(["apt-get", *options, "update"])
        quietly(["apt-get", *options, "download", *ENGINE_PACKAGES], cwd=work / "debs")
        for package in (work / "debs").glob("*.deb"):
            quietly(["dpkg-deb", "--extract", package, work / "root"])
        (work / "root").rename(root)


def root_tarball(cache: Path, name: str, suite: str, packages: str, setup: str) -> Path:
    """A tarball of a Debian suite with packages, after a script; made once."""
    image = cache / f"{name}.tar"
    if image.exists():
        return image
    say(f"making an image from Debian {suite}: {packages}")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        script, part = Path(folder) / "setup.sh", Path(folder) / "root.tar"
        script.write_text(setup)
        quietly(
            [
                "mmdebstrap",
                "--variant=minbase",
                "--mode=root",
                f"--include={packages}",
                "--dpkgopt=path-exclude=/usr/share/doc/*",
                "--dpkgopt=path-exclude=/usr/share/man/*",
                f'--customize-hook=sh {script} "$1" {CERTIFICATES}',
                suite,
                part,
                f"deb {mirror()} {suite} main",
            ]
        )
        part.rename(image)
    return image


def answers() -> bool:
    """Whether a Docker engine answers in this environment."""
    if not shutil.which("docker"):
        return False
    asked = subprocess.run(["docker", "info"], capture_output=True, check=False)
    return asked.returncode == 0


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until nobody else is within: engines have the bridge and the packet filter in common."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def firewall_kept() -> Iterator[None]:
    """Put the packet filter, forwarding and links back as they were."""
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    forwarded = forwarding.read_text()
    rules = quietly(["iptables-save"])
    links = set(os.listdir("/sys/class/net"))
    try:
        yield
    finally:
        for link in set(os.listdir("/sys/class/net")) - links:
            if link == "docker0" or link.startswith("br-"):
                subprocess.run(["ip", "link", "del", link], check=False)
        subprocess.run(["iptables-restore"], input=rules, text=True, check=False)
        forwarding.write_text(forwarded)


@contextlib.contextmanager
def daemon(root: Path, work: Path) -> Iterator[dict[str, str]]:
    """A Docker engine of our own, and the environment in which it is the one that is used."""
    plugins = work / "config" / "cli-plugins"
    plugins.parent.mkdir()
    plugins.symlink_to(root / "usr/libexec/docker/cli-plugins")
    paths = [str(root / "usr/sbin"), str(root / "usr/bin"), os.environ["PATH"]]
    environment = os.environ | {
        "PATH": ":".join(paths),
        "DOCKER_HOST": f"unix://{work}/docker.sock",
        "DOCKER_CONFIG": str(plugins.parent),
    }
    with (work / "dockerd.log").open("w") as log:
        process = subprocess.Popen(
            [
                root / "usr/sbin/dockerd",
                f"--host=unix://{work}/docker.sock",
                f"--data-root={work}/data",
                f"--exec-root={work}/exec",
                f"--pidfile={work}/dockerd.pid",
            ],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await_engine(process, environment, work / "dockerd.log")
        yield environment
    finally:
        stop_engine(process, environment)
        unmount(work)


def await_engine(process: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    """Return when the engine answers; NoEngine with the end of its log where it does not."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        asked = subprocess.run(
            ["docker", "version"], env=environment, capture_output=True, check=False
        )
        if asked.returncode == 0:
            return
        time.sleep(0.25)
    tail = "\n".join(log.read_text().splitlines()[-8:])
    raise NoEngine(f"dockerd did not answer within {START_S} s:\n{tail}")


def stop_engine(process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    """Remove every container, then end the engine."""
    if process.poll() is None:
        listed = subprocess.run(
            ["docker", "ps", "-aq"], env=environment, capture_output=True, text=True, check=False
        )
        if ids := listed.stdout.split():
            subprocess.run(
                ["docker", "rm", "-fv", *ids], env=environment, capture_output=True, check=False
            )
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def unmount(work: Path) -> None:
    """Let go of whatever is still mounted under `work`, the innermost first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((m for m in mounts if m.startswith(f"{work}/")), reverse=True):
        subprocess.run(["umount", "-l", place], check=False)


def import_image(
    tarball: Path, name: str, changes: Sequence[str], environment: dict[str, str]
) -> None:
    """Give a tarball the name that Dockerfiles, Compose files and tests ask for."""
    path = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
    command = ["docker", "import", *(f"--change={each}" for each in (path, *changes))]
    subprocess.run(
        [*command, str(tarball), name], env=environment, check=True, stdout=subprocess.DEVNULL
    )


def import_images(cache: Path, environment: dict[str, str]) -> None:
    """Bring all images, of which the first run makes the tarballs."""
    for suite, name in BASE_IMAGES.items():
        tarball = root_tarball(cache, f"base-{suite}", suite, BASE_PACKAGES, BASE_SETUP)
        import_image(tarball, name, ["ENV LANG=C.UTF-8", 'CMD ["python3"]'], environment)
    tarball = root_tarball(cache, "services", "bookworm", SERVICE_PACKAGES, SERVICE_SETUP)
    for name, changes in SERVICE_IMAGES.items():
        import_image(tarball, name, changes, environment)


def run_command(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the command to its end; a signal to us ends it first."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def with_private_engine(command: Sequence[str]) -> int:
    """Make an engine, run the command, take everything down again."""
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine answers, and a private one needs root")
    default = Path.home() / ".cache/kvrouter-ci"
    cache = Path(os.environ.get("KVROUTER_CI_CACHE", default)) / "docker"
    cache.mkdir(parents=True, exist_ok=True)
    install_tools()
    root = unpacked_engine(cache)
    with (
        one_at_a_time(cache / "private.lock"),
        tempfile.TemporaryDirectory(prefix="kvr-docker-", ignore_cleanup_errors=True) as work,
        firewall_kept(),
        daemon(root, Path(work)) as environment,
    ):
        import_images(cache, environment)
        say("the private engine is up")
        return run_command(command, environment)


def stop(number: int, frame: FrameType | None) -> None:
    """A signal unwinds everything above."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """Run `arguments` with an engine; the exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if answers():
        return run_command(arguments, dict(os.environ))
    try:
        return with_private_engine(arguments)
    except NoEngine as error:
        say(str(error))
        return NO_ENGINE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
