"""Simulated engines: vLLM's dialect without a GPU, KV bytes that are really moved and checked."""
