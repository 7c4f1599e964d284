"""Which port and which GID are used, on machines made of files."""

import ipaddress
import sys
from pathlib import Path

import pytest

from kvrouter_store.rdma.base import LinkType, RdmaUnavailable
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import choose_port

V1, V2 = "IB/RoCE v1", "RoCE v2"


def gid(address: str) -> bytes:
    """The GID of an address; IPv4 is mapped."""
    parsed = ipaddress.ip_address(address)
    return bytes(10) + b"\xff\xff" + parsed.packed if parsed.version == 4 else parsed.packed


class Machine:
    """A folder like /sys/class/infiniband."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def device(
        self,
        name: str,
        *gids: tuple[str, str] | None,
        link: str = "Ethernet",
        state: str = "4: ACTIVE",
        lid: str = "0x0",
    ) -> "Machine":
        """Add a device with one port, and GIDs of (address, type); None leaves an index unset."""
        port = self.folder / name / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (port / "link_layer").write_text(f"{link}\n")
        (port / "state").write_text(f"{state}\n")
        (port / "lid").write_text(f"{lid}\n")
        for index, entry in enumerate(gids):
            raw = gid(entry[0]).hex() if entry else "0" * 32
            words = ":".join(raw[at : at + 4] for at in range(0, 32, 4))
            (port / "gids" / str(index)).write_text(f"{words}\n")
            if entry:
                (port / "gid_attrs" / "types" / str(index)).write_text(f"{entry[1]}\n")
        return self


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def unavailable(machine: Machine, **options: object) -> str:
    """The sentence that these options get."""
    with pytest.raises(RdmaUnavailable) as problem:
        choose_port(RdmaOptions(**options), 0, machine.folder)  # type: ignore[arg-type]
    return str(problem.value)


def test_an_ipv4_gid_of_roce_v2_is_preferred(machine: Machine) -> None:
    machine.device(
        "mlx5_0",
        ("fe80::1", V1),
        ("fe80::1", V2),
        None,
        ("2001:db8::1", V2),
        ("10.1.2.3", V1),
        ("10.1.2.3", V2),
        ("10.1.2.4", V2),
    )
    port = choose_port(RdmaOptions(), 0, machine.folder)
    assert (port.gid_index, port.gid) == (5, gid("10.1.2.3"))
    assert port.routed
    assert str(port) == "mlx5_0 port 1 (Ethernet, GID 5: 10.1.2.3)"


def test_without_ipv4_an_address_that_is_routed_comes_before_one_of_the_link(
    machine: Machine,
) -> None:
    machine.device("rocep1", ("fe80::1", V2), ("2001:db8::1", V2))
    assert choose_port(RdmaOptions(), 0, machine.folder).gid_index == 1


def test_a_gid_that_was_named_is_used_whatever_its_type(machine: Machine) -> None:
    machine.device("mlx5_0", ("fe80::1", V1), ("10.0.0.1", V2))
    port = choose_port(RdmaOptions(dev_name="mlx5_0:0"), 0, machine.folder)
    assert (port.gid_index, port.gid) == (0, gid("fe80::1"))


def test_rails_use_their_own_device_with_its_gid(machine: Machine) -> None:
    for name in ("mlx5_1", "mlx5_2"):
        machine.device(name, ("fe80::1", V2), ("10.0.0.1", V2), ("10.0.0.2", V2))
    options = RdmaOptions(dev_name="mlx5_1:2,mlx5_2")
    chosen = [choose_port(options, rail, machine.folder) for rail in range(3)]
    assert [(port.device, port.gid_index) for port in chosen] == [
        ("mlx5_1", 2),
        ("mlx5_2", 1),
        ("mlx5_1", 2),
    ]


def test_the_first_device_that_can_be_used_is_taken_where_none_is_named(machine: Machine) -> None:
    machine.device("a_down", ("10.0.0.1", V2), state="1: DOWN")
    machine.device("b_bare", ("fe80::1", V1))
    machine.device("c_good", ("10.0.0.3", V2))
    assert choose_port(RdmaOptions(), 0, machine.folder).device == "c_good"


def test_infiniband_is_addressed_by_lid_unless_a_gid_is_named(machine: Machine) -> None:
    machine.device("mlx5_0", ("fe80::2", V1), link="InfiniBand", lid="0x1f")
    port = choose_port(RdmaOptions(link_type="IB"), 0, machine.folder)
    assert (port.lid, port.gid_index, port.routed) == (31, 0, False)
    assert port.link_type == LinkType.INFINIBAND
    assert choose_port(RdmaOptions(hint_gid_index=0), 0, machine.folder).routed


def test_what_is_missing_is_said_with_what_to_do(machine: Machine) -> None:
    machine.device("mlx5_0", ("fe80::1", V1), None)
    assert "has no RoCE v2 GID: give its network interface an IP" in unavailable(machine)
    assert "--dev-name takes mlx5_0" in unavailable(machine, dev_name="mlx5_9")
    assert "no GID of index 1; it has 0" in unavailable(machine, dev_name="mlx5_0:1")
    assert "no GID of index 9; it has 0" in unavailable(machine, hint_gid_index=9)
    assert "there is no port 2 of mlx5_0: see --ib-port" in unavailable(machine, ib_port=2)
    assert "is of link type Ethernet, not IB" in unavailable(machine, link_type="IB")


def test_a_port_that_is_down_or_has_no_lid_is_not_used(machine: Machine) -> None:
    machine.device("a", ("10.0.0.1", V2), state="1: DOWN")
    machine.device("b", ("fe80::1", V1), link="InfiniBand")
    said = unavailable(machine)
    assert "port 1 of a is 1: DOWN: bring its link up" in said
    assert "port 1 of b has no LID: its fabric needs a subnet manager" in said


def test_a_machine_without_a_device_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable, match="this machine has no RDMA device"):
        open_device(RdmaOptions(), sysfs=tmp_path / "infiniband")


def test_a_python_without_pyverbs_is_told_what_to_install(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.device("mlx5_0", ("10.0.0.1", V2))
    monkeypatch.delitem(sys.modules, "kvrouter_store.rdma.pyverbs_names", raising=False)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(RdmaUnavailable, match="install Debian's python3-pyverbs"):
        open_device(RdmaOptions(), sysfs=machine.folder)


def test_a_pyverbs_of_another_rdma_core_is_told_apart_from_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine.device("mlx5_0", ("10.0.0.1", V2))
    site = tmp_path_factory.mktemp("site")
    (site / "pyverbs").mkdir()
    broken = 'raise ImportError("libibverbs.so.1: version `IBVERBS_PRIVATE_59\' not found")'
    (site / "pyverbs" / "__init__.py").write_text(broken)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvrouter_store.rdma.pyverbs_names", raising=False)
    monkeypatch.syspath_prepend(site)
    with pytest.raises(RdmaUnavailable, match=r"IBVERBS_PRIVATE_59.*must be of the version"):
        open_device(RdmaOptions(), sysfs=machine.folder)
