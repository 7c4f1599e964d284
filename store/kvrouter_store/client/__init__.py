"""The store's clients: blocking for engines, asyncio for the router."""
