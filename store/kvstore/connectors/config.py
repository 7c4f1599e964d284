"""What a connector takes from the environment: its token, which no log shows there."""

import os

__all__ = ["TOKEN_VARIABLE", "token_of_environment"]

TOKEN_VARIABLE = "KVROUTER_STORE_TOKEN"  # the variable's name


def token_of_environment() -> str:
    """The token of the store; '' where the environment has none."""
    return os.environ.get(TOKEN_VARIABLE, "")
