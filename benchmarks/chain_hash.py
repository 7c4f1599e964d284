"""Chain hashes of one long prompt, compared with OpenSSL's SHA-256 of the same bytes.

`python -m benchmarks.chain_hash [--quick] [--json FILE]`. Bar `chain_hash`: 131,072 token ids at
block 64 take at most 1.3 times as long as hashlib.sha256 over the encoded blocks as one stream.
"""

import hashlib
import json
import platform
import random
import ssl
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from benchmarks.arguments import parser_of
from kvrouter_store import _core

TOKENS = 131_072
BLOCK_TOKENS = 64
VOCABULARY = 151_936  # Qwen 2 and 3
BAR = 1.3
HEADS = ((24, b"", 1), (1 << 8, b"\x18", 1), (1 << 16, b"\x19", 2), (1 << 32, b"\x1a", 4))


def encoded_blocks(tokens: "array[int]", root: bytes) -> list[bytes]:
    """The canonical CBOR of each block, which the chain hashes."""
    names = _core.chain_hashes(tokens, BLOCK_TOKENS, root=root)
    blocks = []
    for index, start in enumerate(range(0, len(tokens), BLOCK_TOKENS)):
        parent = names[32 * index - 32 : 32 * index] if index else root
        ids = b"".join(encoded(token) for token in tokens[start : start + BLOCK_TOKENS])
        blocks.append(b"\x83\x58\x20" + parent + b"\x98\x40" + ids + b"\xf6")
    if b"".join(hashlib.sha256(block).digest() for block in blocks) != names:
        raise AssertionError("the native chain differs from hashlib's")
    return blocks


def encoded(token: int) -> bytes:
    """One token id as a CBOR unsigned integer."""
    head, size = next((head, size) for limit, head, size in HEADS if token < limit)
    return head + token.to_bytes(size, "big")


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, float]:
    """The figures. The contenders take turns, so that a busy machine slows all of them."""
    chance = random.Random(1)
    tokens = array("I", [chance.randrange(VOCABULARY) for _ in range(TOKENS)])
    root = _core.root_hash()
    blocks = encoded_blocks(tokens, root)
    stream = b"".join(blocks)
    contenders: dict[str, Callable[[], object]] = {
        "chain": lambda: _core.chain_hashes(tokens, BLOCK_TOKENS, root=root),
        "stream": lambda: hashlib.sha256(stream).digest(),
        "digests": lambda: [hashlib.sha256(block).digest() for block in blocks],
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(seconds(run))
    best = {f"{name}_best_ms": 1e3 * min(values) for name, values in times.items()}
    median = {f"{name}_median_ms": 1e3 * statistics.median(v) for name, v in times.items()}
    return {
        "bytes": len(stream),
        **best,
        **median,
        "ratio_to_stream": best["chain_best_ms"] / best["stream_best_ms"],
        "ratio_to_digests": best["chain_best_ms"] / best["digests_best_ms"],
    }


def main() -> None:
    """Measure, print, and write the figures to --json."""
    parser = parser_of("benchmarks.chain_hash", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    arguments = parser.parse_args()
    figures = measure(60 if arguments.quick else 200)
    bars = {"chain_hash": figures["ratio_to_stream"] <= BAR}
    print(f"{TOKENS} tokens, block {BLOCK_TOKENS}, {int(figures['bytes'])} bytes")
    print(f"  {platform.processor() or platform.machine()}, {ssl.OPENSSL_VERSION}")
    print(f"  SHA-256 by {_core.sha256_backend()}")
    for name in ("chain", "stream", "digests"):
        print(
            f"  {name:8} best {figures[f'{name}_best_ms']:.2f} ms, "
            f"median {figures[f'{name}_median_ms']:.2f} ms"
        )
    print(f"  ratio {figures['ratio_to_stream']:.2f} to one stream (bar {BAR}), ", end="")
    print(f"{figures['ratio_to_digests']:.2f} to one hashlib digest per block")
    print(f"  bar chain_hash: {'met' if bars['chain_hash'] else 'MISSED'}")
    if arguments.json:
        result = {"figures": figures, "bars": bars}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
