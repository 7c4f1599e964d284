"""TLS of the asyncio client: Python's own ssl, which reports the same as the native one.

A module of its own: the blocking client works with a Python that has no ssl.
"""

import ssl

from kvrouter_store.connection.address import Address
from kvrouter_store.connection.tls import ASKS, OTHER_HOST, PLAIN, UNTRUSTED, ClientTls, is_wanted

# openssl/x509_vfy.h: not yet valid, expired; another name, another address.
VALIDITY_CODES, OTHER_HOST_CODES = frozenset({9, 10}), frozenset({62, 64})
NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})


def asyncio_context(address: Address, tls: ClientTls) -> ssl.SSLContext | None:
    """The context of an asyncio client; None, and ValueError, as `native_context`."""
    if not is_wanted(address, tls):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = tls.check_host
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    what, path = "CA file", tls.ca_file
    try:
        if tls.ca_file:
            context.load_verify_locations(tls.ca_file)
        else:
            context.set_default_verify_paths()
        if tls.cert_file:
            what, path = "certificate file", f"{tls.cert_file} with the key {tls.key_file}"
            # Without a passphrase: the terminal is not asked.
            context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "-")
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be used: {error.strerror or error}") from None
    return context


def tls_reason(error: ssl.SSLError) -> str:
    """Why Python's ssl failed, in the words of the native client."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in OTHER_HOST_CODES:
            return OTHER_HOST
        if error.verify_code in VALIDITY_CODES:
            return f"the other end's {error.verify_message}"
        return f"{UNTRUSTED}: {error.verify_message}"
    if error.reason in NOT_TLS:
        return PLAIN
    if error.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
        return ASKS
    return (error.reason or str(error)).lower().replace("_", " ")
