"""The HTTP/1.1 client: kept connections to one engine, and their answers."""
