"""What routers of one group share over Redis: their list, load, engines, and cached blocks.

All of it may be lost at any time and comes back by itself. No request waits for it.
"""
