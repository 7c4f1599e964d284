"""Where host memory has no room for all that wait at once, they load in turn."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside

from kvrouter_store._core import StoreServer

POOL_BYTES = 256 << 20
WHOLE = {"latents": [12], "two windows": [12, 2, 5], "latents, window, state": [12, 2, 1]}
"""Blocks of each group that a prompt loads, by kind."""
AT_ONCE = ((20, 8), (48, 12), (48, 30))
"""Chunks of host memory, and prompts of 12 chunks that wait for them."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[str]:
    """A store whose memory engines can map."""
    node = StoreServer(pool_bytes=POOL_BYTES, unix_path=str(tmp_path / "store"))
    node.start()
    yield f"kv://127.0.0.1:{node.port}"
    node.stop()


@pytest.fixture
def away() -> Iterator[str]:
    """A store that engines reach by TCP."""
    node = StoreServer(pool_bytes=POOL_BYTES)
    node.start()
    yield f"kv://127.0.0.1:{node.port}"
    node.stop()


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_hits_that_need_no_host_memory_are_all_loaded(
    vllm_python: Path, site: Path | None, here: str
) -> None:
    """They come from the store's own memory."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "small_memory.py", model, here)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    for kind, one in WHOLE.items():
        for chunks, many in ((8, 1), (40, 1), *AT_ONCE):
            loaded = found[f"{kind}, {chunks} chunks, {many} prompts"]
            assert loaded == [many * blocks for blocks in one], (kind, chunks, many)


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_long_prompts_in_small_blocks_are_loaded_whole_from_a_full_store(
    vllm_python: Path, site: Path | None, here: str
) -> None:
    """Prints what they cost vLLM's scheduler, too."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "long_prompt.py", model, here)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["blocks"] == [2000] * 10
    assert found["failed"] == 0


@pytest.mark.vllm
@pytest.mark.timeout(200)
def test_what_a_request_may_not_load_and_what_no_sound_store_says_is_computed(
    vllm_python: Path, site: Path | None, here: str
) -> None:
    """Of each: blocks loaded, loads that failed, tokens computed."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "refused_loads.py", model, here)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["as it is"] == [12, 0, 7]
    assert found["no tiers"] == [0, 0, 12 * 64 + 7]
    assert found["beyond"] == [12, 1, 12 * 64 + 7]
    assert found["told together"]  # what one rank tells beside another is not lost


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_hits_that_need_many_times_the_host_memory_are_loaded_and_longer_prompts_in_part(
    vllm_python: Path, site: Path | None, away: str
) -> None:
    """Every byte that is read is compared (inside/scheduled.py)."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "small_memory.py", model, away)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert not [name for name, blocks in found.items() if blocks is None]
    assert found["latents, 8 chunks, 1 prompts"] == [8]
    for kind, one in WHOLE.items():
        for chunks, many in ((40, 1), *AT_ONCE):
            loaded = found[f"{kind}, {chunks} chunks, {many} prompts"]
            assert loaded == [many * blocks for blocks in one], (kind, chunks, many)
