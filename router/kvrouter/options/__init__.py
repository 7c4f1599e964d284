"""Settings: flags, environment, YAML files, and types that several packages share."""
