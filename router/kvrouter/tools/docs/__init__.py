"""Writes the generated pages of docs/ from settings, metrics and parameter tables."""
