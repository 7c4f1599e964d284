"""What the router says of a host that allows less than its settings."""

from kvrouter.http.server.settings import ClientSettings


def test_memory_for_bodies_beyond_what_is_free_is_told_with_the_remedy() -> None:
    def told(size: str) -> list[str]:
        settings = ClientSettings.model_validate({"max_body_memory": size})
        return [one for one in settings.lacks if "--max-body-memory" in one]

    assert told("1MiB") == []
    (one,) = told("900TiB")
    assert one.startswith("--max-body-memory 900.0TiB is more than the ")
    assert one.endswith("lower it, or give the container a larger limit")
