"""KV events, as vLLM publishes them: their sockets and settings. It needs pyzmq and pydantic."""
