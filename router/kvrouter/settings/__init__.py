"""Groups of the router's settings, which `kvrouter.config.RouterSettings` puts together."""
