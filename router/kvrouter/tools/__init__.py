"""Commands beside the router: simulator, demo, benchmark, doctor, status."""
