"""What the store costs, beside memory copies, raw C sockets and other stores."""
