"""What is known of one request, and what its log line, trace and headers say."""
