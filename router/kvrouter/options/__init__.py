"""What settings are made of: flags, files, and types that several groups of settings share."""
