"""A queue before the prefill engines: prompts are bound when one is about to be free."""
