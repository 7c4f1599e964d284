"""Property tests have no deadline: the time of one example depends on the machine only."""

from hypothesis import settings

settings.register_profile("kvrouter", deadline=None)
settings.load_profile("kvrouter")
