"""What the store's clients raise. Nothing here does I/O.

KVStoreError
 +- StoreUnavailable     no answer: the node is away, the link broke, or the deadline passed
 |   +- DeadlineExceeded   the node is there, but did not answer in time
 |   +- Untrusted          TLS failed: a certificate is wrong, or one end does not speak TLS
 +- StoreRefused         the node answered with a refusal
 |   +- Unauthorized       the node asks for a token, and the client showed none of its tokens
 |   +- UnknownManifest    the manifest was never registered with this node
 +- CorruptBlock         the bytes of a block do not match their digest
 +- LeaseLost            a lease or reservation is not held any more
 +- BadDocument          a cache spec or manifest is malformed
 +- StoreClosed          the client (or a lease of it) was used after close()
"""


class KVStoreError(Exception):
    """Anything that a client of the store raises."""


class StoreUnavailable(KVStoreError):
    """No answer came: recompute, or try again later. Nothing is known of the operation's effect."""


class DeadlineExceeded(StoreUnavailable):
    """The operation's deadline passed before the answer came. Its connection was given up."""


class Untrusted(StoreUnavailable):
    """TLS with the node failed: a certificate is wrong, or one end is plain."""


class StoreRefused(KVStoreError):
    """The node understood the request and refused it; a retry changes nothing."""

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class Unauthorized(StoreRefused):
    """The node serves only clients with one of its tokens."""


class UnknownManifest(StoreRefused):
    """The manifest is not registered with this node (it may have restarted)."""


class CorruptBlock(KVStoreError):
    """The bytes of a block do not match their digest: compute the block again."""


class LeaseLost(KVStoreError):
    """A lease or reservation was given back, or its connection was lost."""


class BadDocument(KVStoreError):
    """A cache spec, layout or manifest is malformed."""


class StoreClosed(KVStoreError):
    """The client was closed."""
