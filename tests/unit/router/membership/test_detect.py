"""Detection of engines by their own pages, without a socket."""

from collections.abc import Mapping

import pytest

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import AUTO, FAMILIES, Families
from kvrouter.engines.families.pages import EnginePages, ProbeFailed
from kvrouter.engines.families.vllm import Vllm
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


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        (b'"max_total_num_tokens":4096', 4096),
        (b'"max_total_num_tokens":4096,"enable_hierarchical_cache":true', None),
        (b'"max_total_num_tokens":null', None),
        (b'"max_total_num_tokens":0', None),
    ],
)
async def test_sglang_tells_the_size_of_its_cache_unless_the_host_holds_more(
    told: bytes, tokens: int | None
) -> None:
    pages = Pages({"/server_info": b'{"disaggregation_mode":"null",%b}' % told})
    detector = EngineDetector(Families(FAMILIES), pages.ask, connector=AUTO)
    assert (await detector.identify(Engine("e:1", Role.DECODE))).cache_tokens == tokens


async def test_each_page_is_fetched_once() -> None:
    pages = Pages({"/version": b'{"version":"0.32.0"}'})
    await found(pages)
    assert sorted(pages.asked) == sorted(set(pages.asked))


async def test_a_page_that_fails_is_no_page_that_is_absent() -> None:
    async def fail(engine: Engine, path: str, body: bytes | None) -> bytes:
        raise ProbeFailed(f"{path} answers 500", 500)

    with pytest.raises(ProbeFailed, match="500"):
        await EnginePages(Engine("e:1", Role.DECODE), fail).json("/version")
