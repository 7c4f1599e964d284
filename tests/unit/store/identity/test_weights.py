"""What names the weights of a model for all engines, and what does not."""

from pathlib import Path

import pytest

from kvrouter_store.identity.weights import revision_of, weights_digest

COMMIT = "0123456789" * 4


def test_a_repository_is_named_by_its_commit() -> None:
    assert revision_of("org/tiny", COMMIT, weights_digest) == COMMIT


@pytest.mark.parametrize("revision", [None, "", "main", "v1.0", COMMIT[:7], f"{COMMIT}\n"])
def test_a_branch_or_a_tag_names_no_weights(revision: str | None) -> None:
    assert revision_of("org/tiny", revision, weights_digest) == ""


def test_a_folder_is_named_by_its_files_whatever_the_revision(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = {revision_of(str(tmp_path), revision, weights_digest) for revision in (None, COMMIT)}
    assert found == {weights_digest(tmp_path)}


def test_a_folder_without_weights_has_no_name(tmp_path: Path) -> None:
    assert revision_of(str(tmp_path), COMMIT, weights_digest) == ""
