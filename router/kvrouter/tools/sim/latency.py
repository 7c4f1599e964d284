"""How long a simulated engine takes. Pure: it returns seconds, and the engine waits.

The model is that of llm-d-inference-sim (docs/latency-simulation.md): a constant for a prefill or a
sum over its tokens, a separate time for loaded KV, a normal distribution within 70 % of the mean,
and a factor that grows with the number of running requests.
"""

import time
from random import Random

from kvrouter.tools.sim.settings import SimSettings

_WIDEST = 0.7


class LatencyModel:
    """Times in seconds, from the flags. The random generator is the only state."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self._random = Random(time.time_ns() if settings.seed is None else settings.seed)

    def transfer(self, loaded_tokens: int, running: int) -> float:
        """Seconds that a load of `loaded_tokens` from the store takes."""
        if loaded_tokens == 0:
            return 0.0
        settings = self._settings
        constant_s = settings.kv_cache_transfer_latency
        if constant_s > 0:
            return self._drawn(constant_s, settings.kv_cache_transfer_latency_std_dev, running)
        mean_s = settings.kv_cache_transfer_time_per_token * loaded_tokens
        return self._drawn(mean_s, settings.kv_cache_transfer_time_std_dev, running)

    def prefill(self, computed_tokens: int, loaded_tokens: int, running: int) -> float:
        """Seconds that computing `computed_tokens` takes.

        If KV was loaded, the time of the load replaces a constant --time-to-first-token. A time per
        token counts what is computed nevertheless.
        """
        settings = self._settings
        constant_s = settings.time_to_first_token
        if constant_s > 0:
            spread_s = settings.time_to_first_token_std_dev
            return 0.0 if loaded_tokens else self._drawn(constant_s, spread_s, running)
        mean_s = settings.prefill_overhead + settings.prefill_time_per_token * computed_tokens
        return self._drawn(mean_s, settings.prefill_time_std_dev, running)

    def next_token(self, running: int) -> float:
        """Seconds until the next token of an answer."""
        mean_s = self._settings.inter_token_latency
        return self._drawn(mean_s, self._settings.inter_token_latency_std_dev, running)

    def load_factor(self, running: int) -> float:
        """1 with a single request, --time-factor-under-load with --max-num-seqs requests."""
        most, factor = self._settings.max_num_seqs, self._settings.time_factor_under_load
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
