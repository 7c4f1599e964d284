"""What the store benchmark measures: stores, sizes, batches and clients."""

from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64KiB": 64 * KIB, "1MiB": MIB, "4MiB": 4 * MIB}
BATCHES = (1, 16)
CLIENTS = (1, 4)
OWN = ""  # the environment that this runs in
BOTH = ("put", "get")
MATCH_HASHES = 64
POOL_SLACK_BYTES = 64 * MIB
MIX_CLIENTS = 2


@dataclass(frozen=True)
class Entry:
    """One store and how to use it: `maker` is MODULE:CLASS of a contender."""

    name: str
    maker: str
    options: dict[str, str] = field(default_factory=dict)
    server: str = ""
    ops: tuple[str, ...] = BOTH
    environment: str = OWN

    @property
    def is_peer(self) -> bool:
        """Whether the run can do without it."""
        return self.server in {"Mooncake", "Redis"}


@dataclass(frozen=True)
class Stage:
    """A size and a number of clients: all batches of it are measured with the same connections."""

    size: str
    clients: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return SIZES[self.size]


@dataclass(frozen=True)
class Effort:
    """How much to measure. `set_bytes`: the bytes that all clients move in one round."""

    rounds: int
    set_bytes: int
    stages: tuple[Stage, ...]
    mix_s: float
    match_s: float
    least_pool_bytes: int = 1024 * MIB

    def blocks(self, stage: Stage) -> int:
        """Blocks of each client: at least one batch of the largest."""
        bytes_each = max(self.set_bytes // stage.clients, BATCHES[-1] * stage.block_bytes)
        return bytes_each // stage.block_bytes

    def memory_bytes(self, client: int) -> int:
        """The largest memory of one client over all its stages."""
        stages = [*(s for s in self.stages if client < s.clients), MIX_STAGE]
        return max(self.blocks(stage) * stage.block_bytes for stage in stages)

    @property
    def pool_bytes(self) -> int:
        """The pool of every server: room for all blocks of one contender."""
        stages = [*self.stages, MIX_STAGE]
        held = max(self.blocks(s) * s.block_bytes * s.clients for s in stages)
        return max(self.least_pool_bytes, held + POOL_SLACK_BYTES)


MIX_STAGE = Stage("1MiB", MIX_CLIENTS)
ALL_STAGES = tuple(Stage(size, clients) for size in SIZES for clients in CLIENTS)
FULL = Effort(rounds=11, set_bytes=128 * MIB, stages=ALL_STAGES, mix_s=1.5, match_s=0.4)
QUICK = Effort(
    rounds=2,
    set_bytes=32 * MIB,
    stages=(*(Stage(size, 1) for size in SIZES), Stage("1MiB", 4)),
    mix_s=0.5,
    match_s=0.1,
    least_pool_bytes=256 * MIB,
)

_HERE = "benchmarks.store.contenders"


def _copy(name: str, digest: str) -> Entry:
    return Entry(name, f"{_HERE}.copies:Copy", {"digest": digest})


def _raw(transport: str, digest: str) -> Entry:
    name = f"raw C {transport}" + (f"+{digest}" if digest != "none" else "")
    options = {"transport": transport, "digest": digest}
    return Entry(name, f"{_HERE}.raw:Raw", options, "raw")


def _ours(transport: str, digests: str, made: str = "Kvstore", name: str = "") -> Entry:
    ops = BOTH if made == "Kvstore" else ("get",)
    name = f"kvstore {name or transport}" + ("" if digests == "checked" else " unverified")
    server = f"kvstore {digests}"
    return Entry(name, f"{_HERE}.kvstore:{made}", {"transport": transport}, server, ops)


MEMCPY, FUSED = _copy("memcpy", "none"), _copy("memcpy+crc32c", "crc32c")
SHM = _ours("shm", "checked")
MOONCAKE = Entry(
    "Mooncake", f"{_HERE}.mooncake:Mooncake", server="Mooncake", environment="Mooncake"
)
REDIS = Entry("Redis", f"{_HERE}.redis:Redis", server="Redis")
# Unverified: at a node with digests off, where none is computed.
DIGESTS = ("checked", "off")
RANGED = (
    MEMCPY,
    FUSED,
    *(_raw(transport, digest) for transport in ("unix", "tcp") for digest in ("none", "crc32c")),
    *(_ours(kind, digests) for kind in ("shm", "unix", "tcp") for digests in DIGESTS),
    *(_ours("shm", digests, "View", "view") for digests in DIGESTS),
    MOONCAKE,
    REDIS,
)
MIXERS = (FUSED, SHM)


def _match(name: str, made: str, window: int) -> Entry:
    options = {"transport": "unix", "window": str(window)}
    return Entry(name, f"{_HERE}.kvstore:{made}", options, "kvstore checked")


# What is asked, and by how many clients each. The bar judges the pipelined frames: what the node
# sustains; a blocking client waits for a round trip each time.
MATCHES = (
    (_match("kvstore frames pipelined", "Pipelined", 32), (1, 2)),
    (_match("kvstore blocking", "Kvstore", 1), CLIENTS),
)
