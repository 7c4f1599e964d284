"""KV events of engines: received, put in order, and applied to the prefix index."""
