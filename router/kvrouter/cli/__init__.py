"""The `kvrouter` command line."""
