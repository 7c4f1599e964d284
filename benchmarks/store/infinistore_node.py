"""InfiniStore's server, in its own environment, with preloaded libraries.

Takes InfiniStore's own command line.
"""

import sys

import infinistore.server

if __name__ == "__main__":
    # It wants oom_score_adj = -1000, which takes a capability that nothing else here needs.
    infinistore.server.prevent_oom = lambda: None
    sys.exit(infinistore.server.main())
