"""Connectors that run inside engines."""
