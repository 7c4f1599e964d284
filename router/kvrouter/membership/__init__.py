"""Which engines there are, whether they are healthy, and what they can do."""
