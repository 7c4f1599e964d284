"""Tiers below a node: stores that users run already, asked for blocks that the node lacks."""
