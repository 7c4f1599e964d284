"""Messages between routers, byte for byte as releases with version 1 of the format send them."""

import msgspec
import pytest

from kvrouter.replicas.messages import (
    VERSION,
    BadEnvelope,
    Change,
    Domain,
    Envelope,
    Guess,
    Item,
    SnapshotRequest,
    State,
    decode,
    encode,
)

SENDER = "00c0ffee00c0ffee"
ADDRESS = "10.0.0.1:8000"
RECORDED: list[tuple[Item, str]] = [
    (
        State("router-1", 7, {ADDRESS: 1024}, [Change(ADDRESS, "drain", 9, SENDER)]),
        "9401b0303063306666656530306330666665652a9195a173a8726f757465722d310781ad31302e302e302e313a38"
        "303030cd04009194ad31302e302e302e313a38303030a5647261696e09b030306330666665653030633066666565",
    ),
    (
        Guess(ADDRESS, Domain(16, bytes(range(8))), bytes(range(16))),
        "9401b0303063306666656530306330666665652a9194a167ad31302e302e302e313a383030309210c40800010203"
        "04050607c410000102030405060708090a0b0c0d0e0f",
    ),
    (SnapshotRequest(), "9401b0303063306666656530306330666665652a9191a161"),
]


@pytest.mark.parametrize(("item", "recorded"), RECORDED, ids=["state", "guess", "request"])
def test_a_recorded_message_means_what_it_did(item: Item, recorded: str) -> None:
    sent = Envelope(1, SENDER, 42, [item])
    assert decode(bytes.fromhex(recorded)) == sent
    now = bytes.fromhex(recorded)
    if isinstance(item, State):  # it has got a member since then, behind the others: 6, not 5
        now = now.replace(b"\x95\xa1s", b"\x96\xa1s") + b"\x80"
    assert encode(sent) == now


class StateOfBefore(msgspec.Struct, tag="s", array_like=True):
    """The members that routers of before read."""

    name: str
    epoch: int
    load: dict[str, int]
    changes: list[Change] | None = None


def test_routers_of_before_read_a_state_that_tells_prefill_legs() -> None:
    changes = [Change(ADDRESS, "drain", 9, SENDER)]
    state = State("router-1", 7, {ADDRESS: 1024}, changes, {ADDRESS: (1, 1000, 150)})
    message = encode(Envelope(1, SENDER, 42, [state]))
    assert decode(message).items == [state]
    items = msgspec.msgpack.decode(message)[3]
    (read,) = msgspec.convert(items, list[StateOfBefore])
    assert read == StateOfBefore("router-1", 7, {ADDRESS: 1024}, changes)


def test_a_message_of_another_version_is_refused_for_that() -> None:
    message = bytearray.fromhex(RECORDED[0][1])
    message[1] = VERSION + 1
    with pytest.raises(BadEnvelope, match="version"):
        decode(bytes(message))
