"""The OpenAI-compatible router between clients and prefill and decode engines."""
