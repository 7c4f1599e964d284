"""KV caches made of torch tensors, put into the store and loaded layer by layer.

Nothing here imports an engine; only `cuda` imports torch, when it is used.
"""
