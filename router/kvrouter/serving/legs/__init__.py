"""The legs of one prompt: planned, prefilled, landed, decoded."""
