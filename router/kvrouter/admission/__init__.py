"""How many requests run at a time, and where the others wait."""
