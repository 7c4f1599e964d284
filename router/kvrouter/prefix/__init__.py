"""Where the KV of a prompt is: tokens, block hashes, engines' caches, the store."""
