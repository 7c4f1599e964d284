"""Traces of requests across both legs; OpenTelemetry is known to `otlp` alone."""
