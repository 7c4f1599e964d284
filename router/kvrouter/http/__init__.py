"""kvrouter.http."""
