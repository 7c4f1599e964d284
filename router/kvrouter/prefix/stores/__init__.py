"""What the router asks of KV stores: matches and landings."""
