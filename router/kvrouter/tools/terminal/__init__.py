"""`kvrouter status`: what a router knows at this moment, in a terminal or for a script."""
