"""The connection to Redis that service discovery and router groups share."""
