"""Benchmarks: `python -m benchmarks.NAME --quick`. Never imported by the product.

wire: what a request costs the router. planner: routing policies. headline: a fleet with and
without the store. store, connectors, tiers, offloading: the store, engines' connectors, tiers below
it, vLLM's offloading. soak: hours under load. cuda: what needs a GPU. native: single functions.
"""
