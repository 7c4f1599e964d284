"""What became of each prompt token: reused from where, or computed for which reason."""
