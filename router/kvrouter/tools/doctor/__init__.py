"""`kvrouter doctor`: what is wrong with a set-up of engines, store and host, and what to do."""
