"""TLS of the store's clients: the files they use, and what they report where TLS fails.

`kvrouter_store.node.start_checks` is the node's side.
"""

from dataclasses import dataclass

from kvrouter_store._core import TlsContext
from kvrouter_store.connection.address import Address

# As csrc/net/tls.cpp words them.
PLAIN = "the other end does not speak TLS"
ASKS = "the other end asks for a certificate"
UNTRUSTED = "the other end's certificate is not trusted"
OTHER_HOST = "the certificate is of another host"
REMEDIES = {
    PLAIN: "write kv:// where it is to be plain",
    ASKS: "give KVROUTER_STORE_CERT_FILE and KVROUTER_STORE_KEY_FILE",
    UNTRUSTED: "give the CA that signed it (KVROUTER_STORE_CA_FILE)",
    OTHER_HOST: "reach it by a name that is in the certificate",
}


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Paths of PEM files for a client of kvs://HOST:PORT; all may be left out.

    ca_file: the CA of the node's certificate, or that certificate itself; left out: the CAs that
        this machine trusts. cert_file, key_file: shown to a node that asks for them; both or none.
    check_host: whether the certificate must name the host; False only where `ca_file` is the very
        certificate of the node.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    check_host: bool = True


def native_context(address: Address, tls: ClientTls) -> TlsContext | None:
    """The context of a blocking client; None where the address is plain.

    ValueError in one sentence: a file cannot be used, libssl is missing, or files are given for an
    address that would not use them.
    """
    if not is_wanted(address, tls):
        return None
    return TlsContext.client(
        cert_file=tls.cert_file,
        key_file=tls.key_file,
        ca_file=tls.ca_file,
        check_host=tls.check_host,
    )


def sentence(reason: str, address: Address | None = None) -> str:
    """What a client reports where TLS failed, with the remedy if there is one."""
    where = f" at {address}" if address else ""
    remedies = [f"; {text}" for start, text in REMEDIES.items() if reason.startswith(start)]
    return f"no TLS with the store{where}: {reason}{''.join(remedies)}"


def is_wanted(address: Address, tls: ClientTls) -> bool:
    """Whether the address asks for TLS. ValueError where the files do not fit that."""
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ValueError("a certificate and its key go together: give cert_file and key_file")
    given = tls.ca_file or tls.cert_file
    if given and not address.tls and not address.path:
        raise ValueError(
            f"{address} is plain and would not use {given}: write kvs://, or give no file"
        )
    return address.tls
