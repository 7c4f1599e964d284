"""The stores, a module for each. Each imports its own client, in its own environment."""
