"""The correctness canary: sampled answers, computed again by one engine alone, and compared."""
