"""Settings of all tests."""

from hypothesis import settings

# The same examples on every run, and no limit in wall time: a shared machine may be slow.
settings.register_profile("finemoe", derandomize=True, deadline=None)
settings.load_profile("finemoe")
