"""What a connector takes from the environment: its token, which no log shows there, and files."""

import os

from kvrouter_store.connection.tls import ClientTls

TOKEN_VARIABLE = "KVROUTER_STORE_TOKEN"  # the variable's name


def token_of_environment() -> str:
    """The token of the store; '' where the environment has none."""
    return os.environ.get(TOKEN_VARIABLE, "")


def tls_of_environment() -> ClientTls:
    """The files for a store at kvs://; none where the environment has none."""
    ca, cert, key = (
        os.environ.get(f"KVROUTER_STORE_{name}_FILE", "") for name in ("CA", "CERT", "KEY")
    )
    return ClientTls(ca, cert, key)
