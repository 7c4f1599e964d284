"""The first line of `kvrouter why` names what was planted, as docs/why-causes.md shows it."""

from pathlib import Path

from tests.integration.why.pictures import PAGE, page, shown
from tests.integration.why.planted import BLOCK, Cluster, cluster, prompts

TURNS = ("--policy", "round_robin")
LONG = 20 * BLOCK + 1
ODD = 5  # prompts: in the second round each one goes to the other one of two engines


async def rounds(here: Cluster, asked: list[list[int]], count: int = 2) -> str:
    """Ask for all prompts, several times; the ladder then."""
    for _ in range(count):
        for prompt in asked:
            await here.ask(prompt)
    return await here.why()


async def test_nothing_is_wrong(tmp_path: Path) -> None:
    async with cluster(tmp_path, prefill=[()], decode=[()]) as here:
        told = (await rounds(here, prompts(3, LONG))).splitlines()[0]
        assert told.startswith("No avoidable loss")
        assert "49." in told  # of each prompt the last token is computed again


async def test_a_salt_per_request(tmp_path: Path) -> None:
    async with cluster(tmp_path, decode=[()]) as here:
        for number in range(6):
            await here.ask(prompts(1, LONG)[0], cache_salt=f"salt {number}")
        shown("salt", await here.why())


async def test_engines_with_different_block_sizes(tmp_path: Path) -> None:
    both = [(), ("--block-size", "32")]
    async with cluster(tmp_path, decode=both, router=TURNS) as here:
        shown("block-size", await rounds(here, prompts(ODD, LONG)))


async def test_weights_that_were_renewed_on_one_engine(tmp_path: Path) -> None:
    both = [(), ("--weights-revision", "r2")]
    async with cluster(tmp_path, decode=both, router=TURNS) as here:
        shown("weights", await rounds(here, prompts(ODD, LONG)))


async def test_another_hash_seed_on_one_engine(tmp_path: Path) -> None:
    both = [(), ("--hash-seed", "1")]
    async with cluster(tmp_path, decode=both, router=TURNS) as here:
        shown("hash", await rounds(here, prompts(ODD, LONG)))


async def test_a_pool_that_is_too_small(tmp_path: Path) -> None:
    small = ("--kv-cache-size", "32", "--kv-bytes-per-token", "8192")
    async with cluster(tmp_path, decode=[small], store=("--memory", "16MiB")) as here:
        shown("pool", await rounds(here, prompts(12, LONG)))


async def test_prompts_that_never_come_back_evict_those_that_do(tmp_path: Path) -> None:
    small = ("--kv-cache-size", "32", "--kv-bytes-per-token", "8192")
    lru = ("--memory", "32MiB", "--eviction", "lru")
    async with cluster(tmp_path, decode=[small], store=lru) as here:
        kept = prompts(3, LONG)
        for seed in range(3):
            await rounds(here, kept, 1)
            await rounds(here, prompts(12, LONG, seed=10 + seed), 1)
        shown("order", await rounds(here, kept, 1))


async def test_an_engine_that_evicts_without_a_store(tmp_path: Path) -> None:
    small = ("--kv-cache-size", "64")
    async with cluster(tmp_path, decode=[small], store=None) as here:
        shown("no-store", await rounds(here, prompts(8, LONG)))


async def test_a_store_that_is_away(tmp_path: Path) -> None:
    async with cluster(tmp_path, prefill=[()], decode=[()]) as here:
        await here.ask(prompts(1, LONG, seed=2)[0])
        assert here.store is not None
        await here.children.kill(here.store)
        shown("away", await rounds(here, prompts(4, LONG), 1))


async def test_a_store_that_does_not_deliver_what_it_promised(tmp_path: Path) -> None:
    broken = ("--kv-cache-size", "32", "--kv-corruption-rate", "100")
    async with cluster(tmp_path, decode=[broken]) as here:
        shown("broken", await rounds(here, prompts(6, LONG)))


async def test_affinity_that_is_off(tmp_path: Path) -> None:
    async with cluster(tmp_path, decode=[(), ()], store=None, router=TURNS) as here:
        shown("affinity", await rounds(here, prompts(ODD, LONG)))


async def test_prompts_shorter_than_a_block(tmp_path: Path) -> None:
    async with cluster(tmp_path, decode=[()]) as here:
        shown("short", await rounds(here, prompts(4, BLOCK - 2)))


async def test_two_causes_at_once(tmp_path: Path) -> None:
    both = [(), ("--weights-revision", "r2")]
    async with cluster(tmp_path, decode=both, router=TURNS) as here:
        for number in range(3):
            for prompt in prompts(2, LONG, seed=3):
                await here.ask(prompt, cache_salt=f"salt {number}")
        told = (await rounds(here, prompts(ODD, LONG))).splitlines()[0]
        assert "another cache_salt" in told
        assert "different weights" in told


def test_the_page_of_causes_is_as_it_would_be_written_now() -> None:
    assert PAGE.read_text() == page()
