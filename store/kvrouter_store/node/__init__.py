"""A store node around the native server: settings, HTTP side, start and stop."""
