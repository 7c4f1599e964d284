"""Cost of the store, compared with memory copies, raw C sockets and other stores."""
