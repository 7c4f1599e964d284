"""A store that engines share, beside vLLM's own offloading of each to private memory."""
