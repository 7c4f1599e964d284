"""How many requests run at a time, and the queue of the others."""
