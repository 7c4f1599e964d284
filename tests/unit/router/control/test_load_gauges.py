"""What gauges of engines, pools and models say of load that is known."""

from kvrouter.control.gauges import load_gauges
from kvrouter.engines.engine import Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.telemetry.metrics import Metrics


class Loaded:
    """A pool, and what its gauges say; some requests wait to begin."""

    def __init__(self, waiting: int = 0) -> None:
        self.pool, self.metrics = EnginePool(), Metrics()
        for gauge in load_gauges(self.pool, self.metrics, lambda: waiting):
            self.metrics.add(gauge)

    def join(
        self, address: str, role: Role, kv_tokens: int | None = None, *models: str, ranks: int = 1
    ) -> None:
        engine = self.pool.add(address, role)
        numbers = tuple(range(ranks))
        self.pool.join(engine, Identity(models or ("m",), kv_tokens=kv_tokens, ranks=numbers))

    def reserve(self, address: str, tokens: int, *, begun: bool = True) -> None:
        engine = self.pool.target(address)
        assert engine is not None
        self.pool.reserve(engine, tokens, begun=begun)

    def says(self, name: str) -> dict[str, float]:
        """The rows of a gauge, by their one label."""
        head = f"kvrouter:{name}{{"
        page = self.metrics.page().decode().splitlines()
        rows = [row.removeprefix(head).split('"') for row in page if row.startswith(head)]
        return {label: float(value[1:]) for _, label, value in rows}


def test_a_leg_that_is_planned_waits_until_it_is_sent() -> None:
    loaded = Loaded()
    loaded.join("p:1", Role.PREFILL)
    loaded.join("d:1", Role.DECODE)
    loaded.reserve("p:1", 10)
    loaded.reserve("d:1", 20, begun=False)
    assert loaded.says("worker_requests") == {"p:1": 1, "d:1": 0}
    assert loaded.says("worker_waiting") == {"p:1": 0, "d:1": 1}
    assert loaded.says("worker_tokens") == {"p:1": 10, "d:1": 20}


def test_a_pool_has_the_load_of_its_engines_and_all_that_wait_to_begin() -> None:
    loaded = Loaded(waiting=3)
    loaded.join("p:1", Role.PREFILL)
    loaded.join("d:1", Role.DECODE)
    loaded.join("d:2", Role.DECODE)
    loaded.reserve("d:1", 20)
    loaded.reserve("d:2", 30, begun=False)
    assert loaded.says("pool_requests") == {"prefill": 0, "decode": 1}
    assert loaded.says("pool_waiting") == {"prefill": 3, "decode": 4}
    assert loaded.says("pool_tokens") == {"prefill": 0, "decode": 50}


def test_an_engine_of_both_roles_counts_in_both_pools() -> None:
    loaded = Loaded()
    loaded.join("b:1", Role.BOTH, 100)
    loaded.reserve("b:1", 20)
    assert loaded.says("pool_saturation") == {"prefill": 0.2, "decode": 0.2}


def test_saturation_is_of_engines_that_tell_what_their_caches_hold() -> None:
    loaded = Loaded()
    loaded.join("d:1", Role.DECODE, 100)
    loaded.join("d:2", Role.DECODE, 300)
    loaded.join("silent:1", Role.DECODE)
    loaded.reserve("d:1", 200)
    loaded.reserve("silent:1", 1000)
    assert loaded.says("worker_saturation") == {"d:1": 2.0, "d:2": 0.0}
    assert loaded.says("pool_saturation") == {"decode": 0.5}
    assert loaded.says("model_saturation") == {"m": 0.5}


def test_an_engine_that_leaves_adds_neither_load_nor_capacity() -> None:
    loaded = Loaded()
    for address in ("d:1", "d:2", "d:3"):
        loaded.join(address, Role.DECODE, 100)
        loaded.reserve(address, 50)
    engines = [loaded.pool.find(address) for address in ("d:2", "d:3")]
    assert engines[0] is not None
    assert engines[1] is not None
    loaded.pool.drain(engines[0])
    loaded.pool.leave(engines[1])
    assert loaded.says("pool_tokens") == {"decode": 50}
    assert loaded.says("pool_saturation") == {"decode": 0.5}


def test_ranks_are_engines_of_their_own() -> None:
    loaded = Loaded()
    loaded.join("d:1", Role.DECODE, 200, ranks=2)
    loaded.reserve("d:1@1", 50)
    assert loaded.says("worker_saturation") == {"d:1@0": 0.0, "d:1@1": 0.5}
    assert loaded.says("pool_saturation") == {"decode": 0.25}


def test_models_share_the_tokens_of_their_engine_and_have_their_own_requests() -> None:
    loaded = Loaded()
    loaded.join("d:1", Role.DECODE, 100, "base", "adapter")
    loaded.join("d:2", Role.DECODE, 100, "base")
    loaded.reserve("d:1", 50)
    loaded.metrics.of("adapter").running = 1
    loaded.metrics.of("base").waiting = 2
    assert loaded.says("model_requests") == {"adapter": 1, "base": 0}
    assert loaded.says("model_waiting") == {"adapter": 0, "base": 2}
    assert loaded.says("model_tokens") == {"adapter": 50, "base": 50}
    assert loaded.says("model_saturation") == {"adapter": 0.5, "base": 0.25}
