"""Decides which engines serve a request: inputs, plans and policies. No I/O."""
