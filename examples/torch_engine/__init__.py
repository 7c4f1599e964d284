"""A small engine over transformers: shows an engine's author how KV is shared through the store.

    python -m kvrouter_store.torch_engine --model FOLDER --store kv://127.0.0.1:7400

It computes one request at a time. Take a copy and change it: it imports itself by relative names.
kvrouter-store ships it, through a link, so that it also runs from a wheel.
"""
