"""What several routers of one group share over Redis: who there is, load, engines, what these hold.

All of it is soft: it can be lost at any time, comes again by itself, and no request waits for it.
"""
