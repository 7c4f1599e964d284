"""What docs/torch.md says can be done can be done."""

import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually
from tests.vllm.engines import ask, free_port
from tests.vllm.services import Service

from kvrouter_store._core import StoreServer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
START_S = 180.0
PAGE = Path(__file__).resolve().parents[2] / "docs/torch.md"


def block(opening: str) -> str:
    """The text of the only block that begins so."""
    (found,) = re.findall(rf"^```{opening}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_code_stores_and_loads_all_blocks(
    node: StoreServer, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(block("python").replace("7400", str(node.port)), {})
    assert capsys.readouterr().out == "4 blocks stored\n4 blocks loaded\n"


def test_the_code_finds_a_store_that_was_away(node: StoreServer) -> None:
    names: dict[str, Any] = {}
    exec(block("python").replace("7400", str(node.port)).replace("link.close()", ""), names)
    link, hashes = names["link"], names["blocks"].hashes
    again = StoreServer(port=node.port, pool_bytes=1 << 20)
    node.stop()
    assert eventually(lambda: link.match(hashes) == 0 and link.away)
    again.start()
    try:
        assert eventually(lambda: not link.away)
    finally:
        link.close()
        again.stop()


def test_the_commands_make_a_router_that_answers(
    engine_command: list[str], model: Path, tmp_path: Path
) -> None:
    """As they stand, but for ports that are free here."""
    ports = {name: str(free_port()) for name in ("7400", "8101", "8102", "8000")}
    text = re.sub("|".join(ports), lambda found: ports[found[0]], block("console torch"))
    engine, command = " ".join(engine_command[:-2]), f"{sys.executable} -m kvrouter"
    text = text.replace("$ python", f"$ {engine}").replace("$ kvrouter", f"$ {command}")
    lines = text.replace("\\\n", " ").replace("$MODEL", str(model)).removeprefix("$ ").split("\n$ ")
    more: tuple[list[str], ...] = (
        ["--port", ports["7400"], "--http-port", "0"],
        [],
        [],
        ["--port", ports["8000"]],
    )
    with ExitStack() as owned:
        services = []
        for number, (line, flags) in enumerate(zip(lines, more, strict=True)):
            services.append(Service.start(f"s{number}", [*shlex.split(line), *flags], tmp_path))
            owned.callback(services[-1].stop)
            if not number:
                services[0].wait_port(int(ports["7400"]))
        for service, port in zip(services, ports.values(), strict=True):
            service.wait_port(int(port), START_S)
        services[-1].wait_http(f"127.0.0.1:{ports['8000']}", "/health")
        body = {"model": str(model), "prompt": list(range(200)), "max_tokens": 4}
        status, _ = ask(f"127.0.0.1:{ports['8000']}", "POST", "/v1/completions", body, 60.0)
        assert status == 200
