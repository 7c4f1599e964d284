"""How long a simulated engine takes. Pure: it returns seconds, the engine waits.

The model is llm-d-inference-sim's (docs/latency-simulation.md): a constant per prefill or a sum
over its tokens, a separate time for KV that is brought from elsewhere, a normal spread that never
leaves 70 % of the mean, and a factor that grows with the number of running requests.
"""

import time
from random import Random

from kvrouter.tools.sim.settings import SimSettings

__all__ = ["LatencyModel"]

_WIDEST = 0.7


class LatencyModel:
    """Times in seconds, as the flags describe them. What is drawn at random is the only state."""

    def __init__(self, settings: SimSettings) -> None:
        self._told = settings
        self._random = Random(time.time_ns() if settings.seed is None else settings.seed)

    def transfer(self, loaded_tokens: int, running: int) -> float:
        """Seconds that bringing `loaded_tokens` from the store takes."""
        if loaded_tokens == 0:
            return 0.0
        told = self._told
        constant_s = told.kv_cache_transfer_latency
        if constant_s > 0:
            return self._drawn(constant_s, told.kv_cache_transfer_latency_std_dev, running)
        mean_s = told.kv_cache_transfer_time_per_token * loaded_tokens
        return self._drawn(mean_s, told.kv_cache_transfer_time_std_dev, running)

    def prefill(self, computed_tokens: int, loaded_tokens: int, running: int) -> float:
        """Seconds that computing `computed_tokens` takes.

        A constant --time-to-first-token is replaced by the transfer's time where KV was loaded; a
        time per token counts what is computed after all.
        """
        told = self._told
        constant_s = told.time_to_first_token
        if constant_s > 0:
            spread_s = told.time_to_first_token_std_dev
            return 0.0 if loaded_tokens else self._drawn(constant_s, spread_s, running)
        mean_s = told.prefill_overhead + told.prefill_time_per_token * computed_tokens
        return self._drawn(mean_s, told.prefill_time_std_dev, running)

    def next_token(self, running: int) -> float:
        """Seconds until the next token of an answer."""
        told = self._told
        return self._drawn(told.inter_token_latency, told.inter_token_latency_std_dev, running)

    def load_factor(self, running: int) -> float:
        """1 with a single request, --time-factor-under-load with as many as may run."""
        most, factor = self._told.max_num_seqs, self._told.time_factor_under_load
        if factor == 1.0 or most < 2:
            return 1.0
        share = (min(running, most) - 1) / (most - 1)
        return 1.0 + (factor - 1.0) * max(share, 0.0)

    def _drawn(self, mean_s: float, spread_s: float, running: int) -> float:
        drawn_s = mean_s
        if spread_s > 0 and mean_s > 0:
            drawn_s = self._random.gauss(mean_s, spread_s)
            drawn_s = min(max(drawn_s, mean_s * (1 - _WIDEST)), mean_s * (1 + _WIDEST))
        return drawn_s * self.load_factor(running)
