"""Authentication of callers, their limits, and the ports that the router opens."""
