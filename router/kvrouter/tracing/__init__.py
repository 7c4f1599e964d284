"""Traces of requests across both legs; OpenTelemetry is known to `otlp` and what it imports."""
