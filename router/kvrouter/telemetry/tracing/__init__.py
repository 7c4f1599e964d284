"""Traces of requests across both legs; only `otlp` imports OpenTelemetry."""
