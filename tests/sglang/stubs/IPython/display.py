"""Names that nothing here calls."""

HTML = display = None
