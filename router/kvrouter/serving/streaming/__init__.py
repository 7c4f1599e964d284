"""Answers on their way to the client, and streams that outlive their engine."""
