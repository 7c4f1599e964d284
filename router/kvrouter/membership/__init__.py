"""Which engines there are, whether they are well, and what they can do."""
