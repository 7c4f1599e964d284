"""Benchmarks: `python -m benchmarks.NAME --quick`. Never imported by the product."""
