"""What a piece of work goes through: the product's files and functions, as they are called."""

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self


@dataclass
class Trace:
    """Notes calls of functions in these packages, in this thread, while its context lasts."""

    packages: tuple[Path, ...]
    calls: list[tuple[str, str]] = field(default_factory=list)  # file and function, in order
    deepest: int = 0

    def __enter__(self) -> Self:
        self._depth = 0
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """Those that ran, below their package."""
        return {file for file, _ in self.calls}

    def __str__(self) -> str:
        files = [file for file, _ in self.calls]
        changes = sum(a != b for a, b in itertools.pairwise(files))
        functions = len(set(self.calls))
        return (
            f"{len(set(files))} files, {functions} functions, {len(files)} calls, "
            f"{changes} changes of file, {self.deepest} frames deep"
        )

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        package = next((each for each in self.packages if path.is_relative_to(each)), None)
        if package is None or event not in {"call", "return"}:
            return
        self._depth = max(0, self._depth + (1 if event == "call" else -1))
        self.deepest = max(self.deepest, self._depth)
        if event == "call":
            self.calls.append((str(path.relative_to(package)), frame.f_code.co_qualname))
