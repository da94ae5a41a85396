"""Settings of all tests."""

import signal

from hypothesis import settings

# A run in the background may have been told to ignore Ctrl-C, and so would be every process it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no limit in wall time: a shared machine may be slow.
settings.register_profile("finemoe", derandomize=True, deadline=None)
settings.load_profile("finemoe")
