"""What is read of a kubeconfig, and what is refused without repeating what stands in it."""

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.pods import write_kubeconfig

from kvrouter.membership.kubernetes.api import ApiFailed
from kvrouter.membership.kubernetes.environment import Credentials, credentials_of
from kvrouter.membership.kubernetes.kubeconfig import (
    MAX_BYTES,
    first_that_exists,
    read_kubeconfig,
)

SECRET = "the-very-secret-token"
URL = "https://k:6443"
TWO = """
apiVersion: v1
kind: Config
current-context: gpu
preferences: {}
clusters:
- name: a
  cluster:
    server: https://a:6443/k8s/clusters/c-1
    certificate-authority-data: |
      Q0Eg
      b2YgYQ==
    extensions:
    - name: other
      extension: {last-update: 2025-01-01}
- cluster: {server: "https://b:6443"}
  name: b
contexts:
- {name: gpu, context: {cluster: a, user: ann, namespace: models}}
- {name: cpu, context: {cluster: b, user: bob}}
users:
- name: ann
  user: {token: t-of-ann, client-certificate: null}
- name: bob
  user:
    exec: {apiVersion: v1, command: aws, args: null, env: null, provideClusterInfo: false}
"""


def written(folder: Path, content: str | dict[str, Any]) -> Path:
    path = folder / "config"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_current_context_names_cluster_user_and_namespace(tmp_path: Path) -> None:
    file = read_kubeconfig(written(tmp_path, TWO), None)
    assert (file.namespace, file.user.token) == ("models", "t-of-ann")
    assert file.cluster.server == "https://a:6443/k8s/clusters/c-1"
    assert file.authorities == b"CA of a"


def test_the_url_may_name_another_context(tmp_path: Path) -> None:
    file = read_kubeconfig(written(tmp_path, TWO), "cpu")
    assert (file.namespace, file.cluster.server) == ("default", "https://b:6443")
    assert file.user.exec is not None
    assert (file.user.exec.command, file.user.exec.args) == ("aws", [])


def test_the_first_file_that_exists_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    assert first_that_exists(f"{tmp_path}/none::{path}:{tmp_path}/more") == path
    with pytest.raises(ApiFailed, match="give KUBECONFIG, or run the router in a Pod"):
        first_that_exists(f"{tmp_path}/none:")


def shown(folder: Path, **user: Any) -> Credentials:
    file = read_kubeconfig(write_kubeconfig(folder, URL, user=user), None)
    return credentials_of(file.user, file.folder)


def test_data_and_token_files_win_over_what_stands_beside_them(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("of-the-file\n")
    assert shown(tmp_path, token="x", tokenFile="t").authorization == "Bearer of-the-file"
    for name in ("certificate", "key"):
        (tmp_path / name).write_text(f"{name} of the file")
    files = {"client-certificate": "certificate", "client-key": "key"}
    assert shown(tmp_path, **files).certificate == b"certificate of the file\nkey of the file"
    data = {"client-key-data": b64encode(b"other key").decode()}
    assert shown(tmp_path, **files, **data).certificate == b"certificate of the file\nother key"


def test_a_file_that_holds_certificate_and_key_is_named_twice(tmp_path: Path) -> None:
    (tmp_path / "both").write_text("both")
    files = {"client-certificate": "both", "client-key": "both"}
    assert shown(tmp_path, **files).certificate == b"both"


def test_credentials_do_not_show_themselves() -> None:
    assert SECRET not in repr(Credentials(f"Bearer {SECRET}", SECRET.encode()))


@pytest.mark.parametrize(
    ("user", "complaint"),
    [
        (
            {"auth-provider": {"name": "oidc", "config": {"id-token": SECRET}}},
            "use an exec program",
        ),
        ({"as": SECRET}, "acts as another"),
        ({"token": SECRET, "username": "x"}, "both a token and a password"),
        ({"token": f"{SECRET}\nx"}, "not one line of ASCII"),
        ({"tokenFile": "none"}, "No such file or directory; give a readable file"),
        ({"client-key-data": b64encode(SECRET.encode()).decode()}, "or a key alone"),
        ({"client-certificate-data": f"{SECRET}é"}, "client-certificate-data is not base64"),
        ({"token": [SECRET]}, "Expected `str`, got `array` - at `$.users[0].user.token`"),
        ({"exec": {"args": [SECRET]}}, "missing required field `command`"),
    ],
)
def test_a_wrong_user_is_refused_without_its_secrets(
    tmp_path: Path, user: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ApiFailed, match=re.escape(complaint)) as refused:
        shown(tmp_path, **user)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        ({"server": ""}, "write https://HOST:PORT"),
        ({"server": "k:6443"}, "write https://HOST:PORT"),
        ({"server": f"https://x:{SECRET}@k:6443"}, "write https://HOST:PORT"),
        ({"server": f"https://k:6443?{SECRET}"}, "write https://HOST:PORT"),
        ({"proxy_url": f"socks5://x:{SECRET}@p:1"}, "proxy-url of its cluster: write http://"),
        ({"proxy_url": f"http://x:{SECRET}@p:port"}, "proxy-url of its cluster: write http://"),
        ({"certificate_authority_data": "x"}, "certificate-authority-data is not base64"),
    ],
)
def test_a_wrong_cluster_is_refused_without_its_secrets(
    tmp_path: Path, cluster: dict[str, Any], complaint: str
) -> None:
    more = {name: value for name, value in cluster.items() if name != "server"}
    path = write_kubeconfig(tmp_path, cluster.get("server", URL), **more)
    with pytest.raises(ApiFailed, match=complaint) as refused:
        read_kubeconfig(path, None)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "Expected `object`, got `null`"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "it has no current-context; say context=NAME in the URL"),
        ("current-context: gpu", "it has no context 'gpu'"),
        (TWO.replace("cluster: a,", "cluster: z,"), "it has no cluster 'z'"),
        (TWO.replace("user: ann,", "user: zoe,"), "it has no user 'zoe'"),
        (f"users:\n- {SECRET}: [", "it is not YAML (line 2)"),
        (f"token: !!timestamp {SECRET}", "it is not YAML"),
        ("users: !!int ''", "it is not YAML"),
        ("a: " + "[" * 40 + "]" * 40, "levels of lists or mappings"),
        ("#" * (MAX_BYTES + 1), "it cannot be read: more than 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_refused_without_its_secrets(
    tmp_path: Path, content: str, complaint: str
) -> None:
    with pytest.raises(ApiFailed, match=re.escape(complaint)) as refused:
        read_kubeconfig(written(tmp_path, content), None)
    assert SECRET not in str(refused.value)


def test_bytes_that_are_no_text_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(b"\xff\xfe")
    with pytest.raises(ApiFailed, match="it is not YAML"):
        read_kubeconfig(tmp_path / "config", None)
    with pytest.raises(ApiFailed, match="it cannot be read: Is a directory"):
        read_kubeconfig(tmp_path, None)


def test_what_other_programs_keep_in_the_file_changes_nothing(tmp_path: Path) -> None:
    said = yaml.safe_load(TWO) | {"extensions": [{"name": "x"}], "unknown": {1: [None]}}
    path = written(tmp_path, yaml.safe_dump(said))
    assert read_kubeconfig(path, None).namespace == "models"
