"""Endpoints for operators: health, metrics, admin API, status page."""
