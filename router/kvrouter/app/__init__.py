"""The application: settings, wiring, start, reload and drain of `kvrouter serve`."""
