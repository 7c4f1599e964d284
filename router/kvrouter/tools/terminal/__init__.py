"""`kvrouter status`: the live status of a router, in a terminal or for a script."""
