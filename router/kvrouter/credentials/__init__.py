"""Keys and certificates: callers' keys, keys for engines, TLS."""
