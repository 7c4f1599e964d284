"""The status page: one document with the present state of the router, and the page around it."""
