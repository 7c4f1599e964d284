"""docs/troubleshooting.md quotes messages and metrics of the product, word for word."""

import re

import pytest
from tests.docs.pages import DOCS
from tests.test_docs import texts_of_the_product

TEXT = (DOCS / "troubleshooting.md").read_text()
MESSAGE = re.compile(r"^- `([^`]+)`: ", re.MULTILINE)
METRIC = re.compile(r"\b(kvrouter|kvstore|vllm):(\w+)")


def pieces(message: str) -> list[str]:
    """What is fixed in a message: between the dots that stand for a name or a number."""
    return [piece for piece in message.split("...") if piece.strip()]


MESSAGES = MESSAGE.findall(TEXT)


def test_the_page_quotes_messages() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_the_products(message: str) -> None:
    said = "\0".join(texts_of_the_product())
    assert [piece for piece in pieces(message) if piece not in said] == []


@pytest.mark.parametrize("name", sorted({":".join(found) for found in METRIC.findall(TEXT)}))
def test_a_quoted_metric_is_the_products(name: str) -> None:
    assert f"`{name}`" in (DOCS / "metrics.md").read_text()
