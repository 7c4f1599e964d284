"""Who takes part, a module each. Each imports its own client: they run in environments apart."""
