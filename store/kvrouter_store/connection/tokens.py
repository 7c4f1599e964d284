"""Tokens: their form, and where an HTTP request has one. Keeps and logs none."""

import re

# As in a Bearer header, so that one token serves clients and HTTP. At most kMaxTokenBytes of
# csrc/wire/wire.h.
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def check_token(token: str) -> str:
    """The token, or '' for none. Raises ValueError, whose message never repeats it."""
    if token and not TOKEN.fullmatch(token):
        raise ValueError(
            "a token is 16 to 512 letters, digits and . _ ~ + / = -; "
            "make one with `openssl rand -hex 32`"
        )
    return token


def bearer_token(authorization: str) -> str:
    """The token of an Authorization header; '' where it has another scheme, or there is none.

    Schemes are case-insensitive (RFC 9110, section 11.1); blanks and tabs around the token are
    not part of it.
    """
    scheme, _, token = authorization.partition(" ")
    return token.strip(" \t") if scheme.lower() == "bearer" else ""
