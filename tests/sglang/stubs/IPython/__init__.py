"""Stands in for IPython, of which SGLang imports what notebooks show."""
