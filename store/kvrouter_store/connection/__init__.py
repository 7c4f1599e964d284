"""One connection to a store node: address, handshake, TLS, deadlines."""
