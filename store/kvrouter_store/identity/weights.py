"""Which weights a model has, by the files that hold them."""

import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from kvrouter_store.identity.block import canonical_json

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
MAX_HASHED_BYTES = 2 << 30  # larger checkpoints would delay the start by more than seconds


COMMIT = re.compile("[0-9a-f]{40}")


def revision_of(model: str, revision: str | None, digest: Callable[[Path], str]) -> str:
    """What names the weights of `model` for ever: a folder's digest, a repository's commit, or ''.

    revision: of the repository. A branch or a tag will name other weights, and does so in another
    repository whose last part is the same.
    """
    folder = Path(model)
    if folder.is_dir():
        return digest(folder)
    return revision if revision and COMMIT.fullmatch(revision) else ""


def weights_digest(folder: Path) -> str:
    """A digest over the weight files of a local model, or '' where there are none or too much."""
    files = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if not files or sum(path.stat().st_size for path in files) > MAX_HASHED_BYTES:
        return ""
    total = sha256()
    for path in files:
        total.update(canonical_json([path.name, path.stat().st_size]))
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    return total.hexdigest()


def folder_revision(folder: Path) -> str:
    """A digest over a local model's weights and options, or '' where `weights_digest` has none."""
    weights = weights_digest(folder)
    if not weights:
        return ""
    options = folder / "config.json"
    return sha256(
        f"{weights} {options.read_text() if options.exists() else ''}".encode()
    ).hexdigest()
