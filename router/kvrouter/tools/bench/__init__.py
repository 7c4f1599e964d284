"""`kvrouter bench serve`: load on an OpenAI endpoint, in the figures of `vllm bench serve`."""
