"""What gives KV its name: cache spec, part, manifest, layout, block hashes."""
