"""What is known of one request, and what is told of it."""
