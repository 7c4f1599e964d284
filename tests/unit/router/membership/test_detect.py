"""Detection of engines by their own pages, without a socket."""

from collections.abc import Mapping

import pytest

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import AUTO, FAMILIES, Families
from kvrouter.engines.families.pages import EnginePages, ProbeFailed
from kvrouter.engines.families.vllm import Vllm
from kvrouter.engines.pool import EnginePool
from kvrouter.membership.detect import EngineDetector

MODELS = b'{"object":"list","data":[{"id":"m"}]}'
TENSORRT = b'{"object":"list","data":[{"id":"m","owned_by":"tensorrt_llm"}]}'
ANSWER = b'{"choices":[{"text":"a"}]}'


class Newcomer(Vllm):
    """A family of its own, which declares how `auto` finds it."""

    name = "newcomer"
    detected_by = ("/about", "newcomer")


class Pages:
    """The pages of one engine, and the paths that it was asked for."""

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self.pages = {"/v1/models": MODELS, **pages}
        self.asked: list[str] = []

    async def ask(self, engine: Engine, path: str, body: bytes | None) -> bytes:
        self.asked.append(path)
        if body is not None:
            return ANSWER
        if path not in self.pages:
            raise ProbeFailed(f"{path} answers 404", 404)
        return self.pages[path]


async def found(pages: Pages) -> str | None:
    """The family by `auto`."""
    families = Families({**FAMILIES, Newcomer.name: Newcomer})
    detector = EngineDetector(families, pages.ask, connector=AUTO)
    return (await detector.identify(Engine("e:1", Role.DECODE))).family


@pytest.mark.parametrize(
    ("pages", "family"),
    [
        ({"/about": b'{"newcomer":1}'}, "newcomer"),
        ({"/about": b'{"newcomer":1}', "/version": b'{"version":"0.32.0"}'}, "newcomer"),
        ({"/about": b"[]", "/version": b'{"version":"0.32.0"}'}, "store"),
        ({"/server_info": b'{"disaggregation_mode":"null"}'}, "sglang"),
        ({"/version": b'{"version":"0.32.0"}', "/metrics": b"vllm:nixl_xfer 1\n"}, "nixl"),
        ({"/version": b"<html>"}, "openai"),
        ({"/v1/models": TENSORRT, "/version": b'{"version":"1.3.0"}'}, "openai"),
    ],
)
async def test_a_family_is_found_by_the_page_that_it_declares(
    pages: dict[str, bytes], family: str
) -> None:
    assert await found(Pages(pages)) == family


SGLANG = b'{"disaggregation_mode":"null","max_total_num_tokens":500,"dp_size":2%b}'
HOST = b',"enable_hierarchical_cache":true'
CACHE = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%b"} 1.0\n'
RUNNING = b'vllm:num_requests_running{engine="%d"} 0\n'
VLLM = {"/version": b'{"version":"0.32.0"}'}


@pytest.mark.parametrize(
    ("pages", "kv_tokens"),
    [
        ({**VLLM, "/metrics": CACHE % (0, b"100")}, 1600),
        ({**VLLM, "/metrics": CACHE % (0, b"100") + CACHE % (1, b"100")}, 3200),
        ({**VLLM, "/metrics": CACHE % (0, b"None")}, None),
        (VLLM, None),
        ({"/server_info": SGLANG % b""}, 1000),
        ({"/server_info": SGLANG % HOST}, None),
        ({"/server_info": b'{"disaggregation_mode":"null"}'}, None),
        ({"/v1/models": TENSORRT, "/version": b'{"version":"1.3.0"}'}, None),
    ],
)
async def test_what_the_kv_caches_of_all_ranks_hold_is_read_where_engines_tell_it(
    pages: dict[str, bytes], kv_tokens: int | None
) -> None:
    detector = EngineDetector(Families(), Pages(pages).ask, connector=AUTO)
    assert (await detector.identify(Engine("e:1", Role.DECODE))).kv_tokens == kv_tokens


async def test_each_rank_has_its_share_of_what_the_caches_hold() -> None:
    page = b"".join(CACHE % (rank, b"100") + RUNNING % rank for rank in (0, 1))
    detector = EngineDetector(Families(), Pages({**VLLM, "/metrics": page}).ask, connector=AUTO)
    pool = EnginePool()
    engine = pool.add("e:1", Role.DECODE)
    pool.join(engine, await detector.identify(engine))
    assert [target.kv_tokens for target in pool.targets()] == [1600, 1600]


async def test_each_page_is_fetched_once() -> None:
    pages = Pages({"/version": b'{"version":"0.32.0"}'})
    await found(pages)
    assert sorted(pages.asked) == sorted(set(pages.asked))


async def test_a_page_that_fails_is_no_page_that_is_absent() -> None:
    async def fail(engine: Engine, path: str, body: bytes | None) -> bytes:
        raise ProbeFailed(f"{path} answers 500", 500)

    with pytest.raises(ProbeFailed, match="500"):
        await EnginePages(Engine("e:1", Role.DECODE), fail).json("/version")
