"""Tiers below a node: stores that users run already, asked for blocks that the node lacks.

`registry.SCHEMES` lists them; a new one is a file and a line there (docs/extend.md).
"""
