"""How long a simulated engine takes. Pure: it returns seconds, the engine waits.

The model is llm-d-inference-sim's (docs/latency-simulation.md): a constant per prefill or a sum
over its tokens, a separate time for KV that is brought from elsewhere, a normal spread that never
leaves 70 % of the mean, and a factor that grows with the number of running requests.
"""

import time
from dataclasses import dataclass
from random import Random

from kvrouter.sim.config import SimSettings

__all__ = ["LatencyModel", "latency_model"]

_WIDEST = 0.7


@dataclass(frozen=True)
class LatencyModel:
    """Times in seconds. `random` is the only state."""

    random: Random
    first_token_s: float = 0.0
    first_token_spread_s: float = 0.0
    between_tokens_s: float = 0.0
    between_tokens_spread_s: float = 0.0
    prefill_overhead_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_spread_s: float = 0.0
    transfer_s: float = 0.0
    transfer_spread_s: float = 0.0
    transfer_per_token_s: float = 0.0
    transfer_per_token_spread_s: float = 0.0
    factor_under_load: float = 1.0
    max_running: int = 1

    def transfer(self, loaded_tokens: int, running: int) -> float:
        """Seconds that bringing `loaded_tokens` from the store takes."""
        if loaded_tokens == 0:
            return 0.0
        if self.transfer_s > 0:
            base = self._spread(self.transfer_s, self.transfer_spread_s)
        else:
            mean = self.transfer_per_token_s * loaded_tokens
            base = self._spread(mean, self.transfer_per_token_spread_s)
        return base * self.load_factor(running)

    def prefill(self, computed_tokens: int, loaded_tokens: int, running: int) -> float:
        """Seconds that computing `computed_tokens` takes.

        A constant --time-to-first-token is replaced by the transfer's time where KV was loaded; a
        time per token counts what is computed after all.
        """
        if self.first_token_s > 0:
            if loaded_tokens:
                return 0.0
            base = self._spread(self.first_token_s, self.first_token_spread_s)
        else:
            mean = self.prefill_overhead_s + self.prefill_per_token_s * computed_tokens
            base = self._spread(mean, self.prefill_spread_s)
        return base * self.load_factor(running)

    def next_token(self, running: int) -> float:
        """Seconds until the next token of an answer."""
        base = self._spread(self.between_tokens_s, self.between_tokens_spread_s)
        return base * self.load_factor(running)

    def load_factor(self, running: int) -> float:
        """1 with a single request, `factor_under_load` with as many as may run."""
        if self.factor_under_load == 1.0 or self.max_running < 2:
            return 1.0
        share = (min(running, self.max_running) - 1) / (self.max_running - 1)
        return 1.0 + (self.factor_under_load - 1.0) * max(share, 0.0)

    def _spread(self, mean_s: float, deviation_s: float) -> float:
        if deviation_s <= 0 or mean_s <= 0:
            return mean_s
        drawn = self.random.gauss(mean_s, deviation_s)
        return min(max(drawn, mean_s * (1 - _WIDEST)), mean_s * (1 + _WIDEST))


def latency_model(settings: SimSettings) -> LatencyModel:
    """The latency model that the flags describe."""
    seed = time.time_ns() if settings.seed is None else settings.seed
    return LatencyModel(
        random=Random(seed),
        first_token_s=settings.time_to_first_token,
        first_token_spread_s=settings.time_to_first_token_std_dev,
        between_tokens_s=settings.inter_token_latency,
        between_tokens_spread_s=settings.inter_token_latency_std_dev,
        prefill_overhead_s=settings.prefill_overhead,
        prefill_per_token_s=settings.prefill_time_per_token,
        prefill_spread_s=settings.prefill_time_std_dev,
        transfer_s=settings.kv_cache_transfer_latency,
        transfer_spread_s=settings.kv_cache_transfer_latency_std_dev,
        transfer_per_token_s=settings.kv_cache_transfer_time_per_token,
        transfer_per_token_spread_s=settings.kv_cache_transfer_time_std_dev,
        factor_under_load=settings.time_factor_under_load,
        max_running=settings.max_num_seqs,
    )
