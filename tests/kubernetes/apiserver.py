"""A real Kubernetes API server with its etcd, on loopback, without any node.

The test stands in for the kubelet: it gives Pods their addresses and conditions, and ends them.
"""

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.pods import write_kubeconfig
from tests.vllm.engines import free_port

START_S = 90
STOP_S = 20
ADMIN = "administrator"
ROUTER = "router"
"""Tokens of two users: of one that may do anything, and of one that may do nothing yet."""


class RealApiServer:
    """An API server in front of an etcd; `folder` gets its certificate and its log."""

    def __init__(self, folder: Path, etcd: str) -> None:
        self._folder = folder
        self._certificate = folder / "certificates" / "apiserver.crt"
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        self._command = [str(_programs() / "kube-apiserver"), *_flags(folder, port, etcd)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        log = self._folder / "apiserver.log"
        self._process = _begin(self._command, log)
        _await(lambda: self.ask("GET", "/api/v1/namespaces/default"), self._process, log)

    def stop(self) -> None:
        """Its etcd keeps what it was told."""
        if self._process is not None:
            _end(self._process)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What the administrator is answered, decoded; HTTPError: any status from 400 on."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode() if body is not None else None,
            {"authorization": f"Bearer {ADMIN}", "content-type": kind},
            method=method,
        )
        context = ssl.create_default_context(cafile=str(self._certificate))
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return json.load(answer)

    def write_kubeconfig(self, token: str) -> Path:
        """A kubeconfig of the user whose token it is."""
        ca = str(self._certificate)
        return write_kubeconfig(self._folder, self.url, user={"token": token}, ca=ca)


@contextmanager
def running(folder: Path) -> Iterator[RealApiServer]:
    """A server that answers, with its data in `folder`; all processes end with the block."""
    clients, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    log = folder / "etcd.log"
    etcd = _begin([str(_programs() / "etcd"), *_etcd_flags(folder, clients, peers)], log)
    server = RealApiServer(folder, clients)
    try:
        _await(lambda: urllib.request.urlopen(f"{clients}/health", timeout=5).close(), etcd, log)
        server.start()
        yield server
    finally:
        server.stop()
        _end(etcd)


def _programs() -> Path:
    """The folder of both programs; made where it is missing, which takes a quarter of an hour."""
    script = Path(__file__).with_name("make_apiserver.sh")
    done = subprocess.run([script], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def _etcd_flags(folder: Path, clients: str, peers: str) -> list[str]:
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--unsafe-no-fsync",
    ]


def _flags(folder: Path, port: int, etcd: str) -> list[str]:
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f"{ADMIN},{ADMIN},1,system:masters\n{ROUTER},{ROUTER},2\n")
    return [
        f"--etcd-servers={etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",
        "--disable-admission-plugins=ServiceAccount",  # nothing here gives a namespace its account
    ]


def _begin(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=log.parent)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await(question: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            question()
        except OSError:  # not there yet, its certificate is not, or it answers an error
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(log.read_text()[-2000:])
