"""The HTTP/1.1 server. It knows nothing of OpenAI or engines."""
