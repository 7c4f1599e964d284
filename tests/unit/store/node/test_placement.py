"""Which pages and NUMA nodes a pool is to have, on hosts made up of files."""

import errno
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrouter_store._core import Placement, StoreServer
from kvrouter_store.free_memory import reader
from kvrouter_store.node.placement import (
    HugePages,
    Numa,
    PlacementPlan,
    memory_nodes,
    placement_notes,
    plan,
)
from kvrouter_store.node.settings import StoreSettings

MIB = 1 << 20
GIB = 1 << 30
HUGE = 2 * MIB
HUGETLB = "sys/kernel/mm/hugepages/hugepages-2048kB"
THP = "sys/kernel/mm/transparent_hugepage"
NODE = "sys/devices/system/node"
BARE = {
    "proc/meminfo": "HugePages_Total:       0\nHugepagesize:       2048 kB\n",
    "proc/self/status": "Name:\tx\nMems_allowed_list:\t0-1\n",
    "proc/self/cgroup": "0::/box\n",
    f"{HUGETLB}/nr_hugepages": "0\n",
    f"{HUGETLB}/free_hugepages": "0\n",
    f"{HUGETLB}/resv_hugepages": "0\n",
    f"{HUGETLB}/nr_overcommit_hugepages": "0\n",
    f"{HUGETLB}/surplus_hugepages": "0\n",
    f"{THP}/hpage_pmd_size": f"{HUGE}\n",
    f"{THP}/shmem_enabled": "always within_size advise [never] deny force\n",
    f"{THP}/hugepages-2048kB/shmem_enabled": "always [inherit] within_size advise never\n",
    f"{NODE}/has_memory": "0\n",
}
RICH = {f"{HUGETLB}/nr_hugepages": "600\n", f"{HUGETLB}/free_hugepages": "600\n"}


class Host:
    """A tree of files; `with_` changes some, None takes one away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(BARE)

    def write(self, files: dict[str, str]) -> "Host":
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self

    def shmem(self, mode: str) -> "Host":
        modes = "always within_size advise never deny force".replace(mode, f"[{mode}]")
        return self.write({f"{THP}/shmem_enabled": modes})

    def plan(
        self,
        pool_bytes: int = GIB,
        huge_pages: HugePages = "auto",
        numa: Numa = "auto",
        *,
        prefault: bool = False,
    ) -> PlacementPlan:
        return plan(reader(self.folder), pool_bytes, huge_pages, numa, prefault=prefault)


@pytest.fixture
def made_up(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_pages_that_were_set_aside_are_taken_first(made_up: Host) -> None:
    placement = made_up.write(RICH).shmem("advise").plan().placement
    assert placement.explicit_page_bytes == HUGE
    assert placement.transparent_page_bytes == HUGE  # should they be gone in a moment
    assert not placement.explicit_only


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({f"{HUGETLB}/free_hugepages": "511\n"}, 511),
        ({f"{HUGETLB}/resv_hugepages": "100\n"}, 500),
        ({f"{NODE}/node0/hugepages/hugepages-2048kB/free_hugepages": "44\n"}, 44),
        ({f"{HUGETLB}/free_hugepages": "0\n", f"{HUGETLB}/resv_hugepages": "3\n"}, 0),
    ],
    ids=["too few", "reserved", "on another node", "none"],
)
def test_pages_that_others_have_are_not_free(
    made_up: Host, changes: dict[str, str], free: int
) -> None:
    found = made_up.write({**RICH, **changes}).plan()
    assert found.placement.explicit_page_bytes == 0
    assert f"takes 512 huge pages of 2.0MiB, of which {free} are free" in found.lack
    assert f"`sysctl vm.nr_hugepages={600 + 512 - free}`" in found.lack


def test_pages_that_the_host_makes_on_demand_count(made_up: Host) -> None:
    surplus = {f"{HUGETLB}/nr_overcommit_hugepages": "520\n", f"{HUGETLB}/surplus_hugepages": "8\n"}
    assert made_up.write(surplus).plan().explicit
    assert not made_up.write({f"{HUGETLB}/surplus_hugepages": "9\n"}).plan().explicit


@pytest.mark.parametrize(
    ("cgroup", "limits"),
    [
        ("0::/box/pod\n", {"box/hugetlb.2MB.max": HUGE * 100}),
        ("0::/box/pod\n", {"box/pod/hugetlb.2MB.rsvd.max": HUGE * 100}),
        ("0::/box\n", {"hugetlb.2MB.max": HUGE * 130, "hugetlb.2MB.current": HUGE * 30}),
        (
            "4:cpu:/x\n7:hugetlb:/box\n",
            {"hugetlb/box/hugetlb.2MB.limit_in_bytes": HUGE * 100},
        ),
    ],
    ids=["an outer one", "of reservations", "in part used", "v1"],
)
def test_a_limit_of_the_cgroup_is_heeded_since_a_page_beyond_it_is_a_sigbus(
    made_up: Host, cgroup: str, limits: dict[str, int]
) -> None:
    files = {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in limits.items()}
    found = made_up.write({**RICH, "proc/self/cgroup": cgroup, **files}).plan()
    assert not found.explicit
    assert "of which the cgroup may have 100" in found.lack
    assert "raise hugetlb.2MB.max" in found.lack


def test_a_cgroup_without_a_limit_limits_nothing(made_up: Host) -> None:
    files = {"sys/fs/cgroup/box/hugetlb.2MB.max": "max\n"}
    assert made_up.write({**RICH, **files}).plan().explicit


def test_a_page_much_larger_than_the_pool_is_taken_only_when_asked_for(made_up: Host) -> None:
    made_up.write(RICH)
    assert not made_up.plan(MIB).explicit
    assert not made_up.plan(7 * HUGE + 4096).explicit
    assert made_up.plan(9 * HUGE - 4096).explicit
    assert made_up.plan(MIB, "on").explicit


@pytest.mark.parametrize("mode", ["always", "within_size", "advise", "force"])
def test_transparent_pages_are_next_and_come_by_touch(made_up: Host, mode: str) -> None:
    found = made_up.shmem(mode).plan()
    assert found.placement.transparent_page_bytes == HUGE
    assert found.placement.transparent_by_touch
    assert found.lack == ""


def test_where_they_do_not_come_by_touch_prefaulting_asks_for_them(made_up: Host) -> None:
    asked = made_up.plan(prefault=True)
    assert asked.placement.transparent_page_bytes == HUGE
    assert not asked.placement.transparent_by_touch
    assert asked.lack == ""
    found = made_up.plan()
    assert found.placement.transparent_page_bytes == 0
    assert "off for shared memory (never)" in found.lack
    assert "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`" in found.lack
    assert "--prefault" in found.lack


def test_a_host_that_denies_them_is_not_asked(made_up: Host) -> None:
    found = made_up.shmem("deny").plan(prefault=True)
    assert found.placement.transparent_page_bytes == 0
    assert "(deny)" in found.lack


@pytest.mark.parametrize(("own", "by_touch"), [("advise", True), ("never", False)])
def test_the_setting_of_their_size_goes_before_the_general_one(
    made_up: Host, own: str, by_touch: bool
) -> None:
    made_up.shmem("never" if by_touch else "advise")
    made_up.write({f"{THP}/hugepages-2048kB/shmem_enabled": f"always inherit [{own}]"})
    assert made_up.plan(prefault=True).placement.transparent_by_touch is by_touch


def test_a_host_that_tells_nothing_gives_small_pages(tmp_path: Path) -> None:
    found = Host(tmp_path / "a").plan()
    nothing = plan(reader(tmp_path / "b"), GIB, "auto", "auto", prefault=True)
    assert nothing.placement.transparent_page_bytes == nothing.placement.explicit_page_bytes == 0
    assert "no huge pages to set aside" in nothing.lack
    assert found.placement.numa_nodes == nothing.placement.numa_nodes == []


def test_huge_pages_that_are_off_are_not_looked_for(made_up: Host) -> None:
    found = made_up.write(RICH).shmem("always").plan(huge_pages="off", prefault=True)
    assert not found.explicit
    assert found.placement.transparent_page_bytes == 0
    assert found.lack == found.refusal == ""


def test_huge_pages_that_are_demanded_are_had_or_the_node_does_not_start(made_up: Host) -> None:
    refused = made_up.shmem("always").plan(huge_pages="on")
    assert "`sysctl vm.nr_hugepages=512`, or give --huge-pages auto" in refused.refusal
    granted = made_up.write(RICH).plan(huge_pages="on")
    assert granted.refusal == ""
    assert granted.placement.explicit_only
    assert granted.placement.transparent_page_bytes == 0


@pytest.mark.parametrize(
    ("has_memory", "allowed", "nodes"),
    [
        ("0-1", "0-1", [0, 1]),
        ("0,2-3", "0-7", [0, 2, 3]),
        ("0-3", "1,3", [1, 3]),
        ("0-1", "1", [1]),
        ("", "0", []),
    ],
)
def test_nodes_are_those_with_memory_that_the_process_may_use(
    made_up: Host, has_memory: str, allowed: str, nodes: list[int]
) -> None:
    made_up.write(
        {
            f"{NODE}/has_memory": has_memory,
            "proc/self/status": f"Mems_allowed_list:\t{allowed}\n",
        }
    )
    assert memory_nodes(reader(made_up.folder)) == nodes
    several = nodes if len(nodes) > 1 else []
    assert made_up.plan().placement.numa_nodes == several
    assert made_up.plan(huge_pages="off").placement.numa_nodes == several
    assert made_up.plan(numa="off").placement.numa_nodes == []


def test_a_node_says_what_it_got(made_up: Host) -> None:
    found = made_up.plan()
    server = StoreServer(pool_bytes=MIB, placement=found.placement)
    server.start()
    (pages,) = placement_notes(found, server.placed)
    assert pages.sentence.startswith("the pool has pages of 4.0KiB: a pool of this size takes")
    assert ". " not in pages.sentence
    assert "\n" not in pages.sentence
    server.stop()


def test_nodes_that_this_host_has_not_leave_the_pool_unbound_and_it_says_so(made_up: Host) -> None:
    far = {f"{NODE}/has_memory": "0,901\n", "proc/self/status": "Mems_allowed_list:\t0-1023\n"}
    found = made_up.write(far).plan()
    assert found.placement.numa_nodes == [0, 901]
    server = StoreServer(pool_bytes=64 * MIB, placement=found.placement)
    server.start()
    assert server.placed.numa_error in {errno.EINVAL, errno.EPERM}
    assert server.stats()["numa_used_bytes.any"] == 0
    sentence = [one.sentence for one in placement_notes(found, server.placed)][-1]
    assert "2 NUMA nodes" in sentence
    assert "bound to none (mbind: " in sentence
    server.stop()


def test_a_divided_pool_tells_its_nodes() -> None:
    placement = Placement(numa_nodes=[0, 0])
    server = StoreServer(pool_bytes=64 * MIB, placement=placement)
    server.start()
    if server.placed.numa_error:
        pytest.skip(f"mbind: errno {server.placed.numa_error}: run with CAP_SYS_NICE")
    assert server.placed.numa_regions == 2
    *_, nodes = placement_notes(PlacementPlan(placement), server.placed)
    assert nodes.sentence == "the pool is divided among the NUMA nodes 0, 0"
    assert "numa_used_bytes.any" not in server.stats()
    server.stop()


def test_a_placement_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Placement(explicit_page_bytes=5000)
    with pytest.raises(ValueError, match="power of two"):
        Placement(transparent_page_bytes=1)
    with pytest.raises(ValueError, match="NUMA node"):
        Placement(numa_nodes=[1 << 20])


@pytest.mark.parametrize(
    ("given", "means"), [("on", "on"), (True, "on"), (False, "off"), ("auto", "auto")]
)
def test_yaml_s_bare_on_and_off_are_words_here(given: object, means: str) -> None:
    assert StoreSettings.model_validate({"huge_pages": given}).huge_pages == means


@pytest.mark.parametrize("wrong", [{"huge_pages": "try"}, {"numa": True}, {"numa": "bind"}])
def test_other_words_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StoreSettings.model_validate(wrong)
