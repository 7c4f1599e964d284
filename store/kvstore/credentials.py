"""Tokens that name a tenant to a store node: what one looks like. Reads and logs none."""

import re

__all__ = ["TOKEN", "check_token"]

# What a Bearer header takes, so that one token serves clients and HTTP. Fits MAX_TOKEN_BYTES.
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def check_token(token: str) -> str:
    """The token, or '' for none. Raises ValueError, which never repeats what was given."""
    if token and not TOKEN.fullmatch(token):
        raise ValueError(
            "a token is 16 to 512 letters, digits and . _ ~ + / = -; "
            "make one with `openssl rand -hex 32`"
        )
    return token
