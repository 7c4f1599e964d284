"""A real Kubernetes API server with its etcd, on loopback, without any node.

`programs()` is the folder that `make_apiserver.sh` makes. Pods get their addresses and conditions
from the test, which stands in for the kubelet.
"""

import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.engines import free_port

START_S = 90
STOP_S = 20
ADMIN = "administrator"
ROUTER = "router"


@dataclass(frozen=True)
class RealApiServer:
    """A running server.

    Attributes:
        url: its base.
        folder: holds its certificate, `kubeconfig` of the administrator, and logs.
    """

    url: str
    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "certificates" / "apiserver.crt"

    def ask(self, method: str, path: str, body: Any = None, *, token: str = ADMIN) -> Any:
        """The answer, decoded; HTTPError: any status from 400 on."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode() if body is not None else None,
            {"authorization": f"Bearer {token}", "content-type": kind},
            method=method,
        )
        context = ssl.create_default_context(cafile=str(self.certificate))
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return json.load(answer)

    def write_kubeconfig(self, token: str) -> Path:
        """A kubeconfig of the user whose token it is."""
        path = self.folder / f"kubeconfig-{token}"
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        context = {"cluster": "real", "user": token, "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": token, "user": {"token": token}}],
            "contexts": [{"name": "real", "context": context}],
            "current-context": "real",
        }
        path.write_text(json.dumps(config))
        return path


def programs() -> Path:
    """Where kube-apiserver and etcd are; makes them where they are missing."""
    script = Path(__file__).with_name("make_apiserver.sh")
    done = subprocess.run([script], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@contextmanager
def running(folder: Path) -> Iterator[RealApiServer]:
    """A server that answers, with its data in `folder`; both processes end with the block."""
    found = programs()
    peers, clients, secure = free_port(), free_port(), free_port()
    etcd = [
        str(found / "etcd"),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{clients}",
        f"--advertise-client-urls=http://127.0.0.1:{clients}",
        f"--listen-peer-urls=http://127.0.0.1:{peers}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
        f"--initial-cluster=default=http://127.0.0.1:{peers}",
        "--unsafe-no-fsync",
    ]
    server = RealApiServer(f"https://127.0.0.1:{secure}", folder)
    with _process(etcd, folder / "etcd.log"), _process(
        [str(found / "kube-apiserver"), *_flags(folder, secure, clients)], folder / "apiserver.log"
    ) as process:
        _await_ready(server, process)
        yield server


def _flags(folder: Path, secure: int, etcd: int) -> list[str]:
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f"{ADMIN},{ADMIN},1,system:masters\n{ROUTER},{ROUTER},2\n")
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={secure}",
        f"--cert-dir={folder / 'certificates'}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",
        "--disable-admission-plugins=ServiceAccount",  # nobody makes a namespace's account here
    ]


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=log.parent, env=os.environ)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(server: RealApiServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, urllib.error.URLError):
            server.ask("GET", "/api/v1/namespaces/default")
            return
        time.sleep(0.2)
    raise RuntimeError((server.folder / "apiserver.log").read_text()[-2000:])
