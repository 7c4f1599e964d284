"""As sitecustomize.py: modules of the folder `files` beside it take the place of the product's."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

FILES = Path(__file__).parent / "files"


class Overlay:
    """Finds what is in the folder; of a package, only its __init__.py."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        *_, last = name.split(".")
        place = FILES.joinpath(*name.split("."))
        module, package = place.with_suffix(".py"), place / "__init__.py"
        if module.is_file():
            return spec_from_file_location(name, module)
        if not package.is_file():
            return None
        folders = [str(Path(folder) / last) for folder in path or ()]
        return spec_from_file_location(name, package, submodule_search_locations=folders)


sys.meta_path.insert(0, Overlay)
