"""Connectors of real vLLM engines side by side: `python -m benchmarks.connectors --help`."""
