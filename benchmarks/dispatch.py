"""Time to the first token of the three --decode-dispatch modes, cold, on real vLLM.

    python -m benchmarks.dispatch --vllm-python PYTHON [--rounds N] [--json FILE]

One prefill and one decode engine on a CPU (29M parameters, float32), one core each, one store, and
a router for each mode before the same two engines. Each prompt goes through every mode, one request
at a time, the modes in another order in each round; a cache salt of its own makes each run cold.
Tokens must be equal in all modes, and nearly all of a prompt must come over the connector.
"""

import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from tests.vllm.engines import Engine, transfer_config
from tests.vllm.services import Service, start_router, start_store

from benchmarks import wire_rig
from benchmarks.arguments import parser_of
from benchmarks.headline import BLOCK_TOKENS, Load, Sitting

MODES = ("landing", "chunk", "at-once")
SIZES = (1024, 4096, 8128)
OUTPUT_TOKENS = 4


def first_token(address: str, prompt: list[int], salt: str) -> tuple[float, list[int]]:
    """Seconds until the first event of a stream, and the answer's tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    connection = http.client.HTTPConnection(address, timeout=300)
    try:
        begun_s = time.monotonic()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read(500)!r}")
        first_s, tokens = 0.0, list[int]()
        while line := response.readline():
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic() - begun_s
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
        return first_s, tokens
    finally:
        connection.close()


def cpu_s(engine: Engine) -> float:
    """CPU seconds of all processes of an engine so far."""
    return wire_rig.cpu_s(engine.process.pid)


def measure(
    routers: dict[str, Service], decode: Engine, sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """A row for each prompt and mode, printed at once."""
    draw, rows = random.Random(11), list[dict[str, Any]]()
    for number in range(rounds):
        for size in sizes:
            prompt = [draw.randrange(300, 4000) for _ in range(size)]
            answers = []
            for turn in range(len(MODES)):
                mode = MODES[(number + turn) % len(MODES)]
                before, before_s = decode.prompt_tokens(), cpu_s(decode)
                salt = f"{mode}-{number}-{size}"
                ttft_s, tokens = first_token(routers[mode].address, prompt, salt)
                loaded = decode.prompt_tokens()["external_kv_transfer"]
                loaded -= before.get("external_kv_transfer", 0)
                answers.append(tokens)
                row = {"mode": mode, "size": size, "ttft_s": ttft_s, "loaded": int(loaded)}
                row["decode_cpu_s"] = cpu_s(decode) - before_s
                rows.append(row)
                print(json.dumps(row), flush=True)
                if loaded < (size - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
                    raise SystemExit(f"{mode}: the decode engine loaded only {loaded} of {size}")
            if any(tokens != answers[0] for tokens in answers):
                raise SystemExit(f"answers differ: {answers}")
    return rows


def table(rows: list[dict[str, Any]], sizes: Sequence[int]) -> str:
    """Mean TTFT and CPU time of the decode engine by size and mode, in Markdown."""
    lines = ["| tokens | " + " | ".join(MODES) + " |", "|---|" + "---|" * len(MODES)]
    for size in sizes:
        cells = []
        for mode in MODES:
            found = [r for r in rows if (r["size"], r["mode"]) == (size, mode)]
            ttft_s = mean(r["ttft_s"] for r in found)
            used_s = mean(r["decode_cpu_s"] for r in found)
            cells.append(f"{ttft_s:.3f} s ({used_s:.2f} s of CPU)")
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = parser_of("benchmarks.dispatch", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="of tests/vllm/make_env.sh")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dispatch-") as name, ExitStack() as stack:
        folder = Path(name)
        sitting = Sitting(options.vllm_python, Load(1, 1, 1), folder, stack)
        store = start_store(folder, memory="2GiB")
        stack.callback(store.stop)
        prefill = sitting.engine("prefill", "0", transfer_config(store.url, "kv_producer"))
        decode = sitting.engine("decode", "1", transfer_config(store.url, "kv_consumer"))
        sitting.ready(prefill, decode)
        routers = {}
        for mode in MODES:
            flags = ["--decode-dispatch", mode, "--landing-timeout", "10"]
            routers[mode] = start_router(folder, [prefill.url], [decode.url], store.url, flags)
            stack.callback(routers[mode].stop)
            first_token(routers[mode].address, list(range(300, 600)), f"warm {mode}")
        rows = measure(routers, decode, options.sizes, options.rounds)
    print(table(rows, options.sizes))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
