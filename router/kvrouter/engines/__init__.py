"""Engines as the router knows them: state, pool, models, compatibility, dialects."""
