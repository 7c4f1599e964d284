"""The life of a request, from its body to its last byte."""
