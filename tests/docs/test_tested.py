"""docs/tested.md says what the marks of the tests say."""

from tests.tested import PAGE, page


def test_the_page_of_what_is_tested_is_as_it_would_be_written_now() -> None:
    assert PAGE.read_text() == page(), "python -m tests.tested > docs/tested.md"
