"""Requests for several prompts or samples: split, served in parts, merged."""
