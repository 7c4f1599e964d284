"""A KV store for engines: blocks of KV, named by what they mean, shared by every engine."""
