"""What the router tells of itself: metrics, request log, traces."""
