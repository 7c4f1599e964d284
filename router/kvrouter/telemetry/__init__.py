"""Metrics, request log, traces."""
