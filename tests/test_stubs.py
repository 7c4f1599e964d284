"""The checked-in stubs of the native modules name exactly what the modules offer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = {
    "kvrouter_store._core": ROOT / "store/kvrouter_store/_core.pyi",
    "kvrouter._native": ROOT / "router/kvrouter/_native.pyi",
}
Signature = tuple[str, ...]


def signature(function: ast.FunctionDef) -> Signature:
    """Parameter names in order, with their kinds; a default adds `=`."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    plain = len(positional) - len(arguments.defaults)
    names = [arg.arg + ("=" if at >= plain else "") for at, arg in enumerate(positional)]
    keywords = [
        f"*{arg.arg}" + ("=" if default is not None else "")
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return (*names, *keywords)


def offered(text: str) -> dict[str, Signature | None]:
    """Public names of a stub, methods as Class.method; a signature where there is one alone."""
    found: dict[str, Signature | None] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[prefix + node.name] = None
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                alone = not node.decorator_list and prefix + node.name not in found
                found[prefix + node.name] = signature(node) if alone else None
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = None
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                found.update({prefix + name: None for name in names if not name.startswith("_")})

    visit(ast.parse(text).body, "")
    return found


@pytest.mark.parametrize("module", NATIVE)
def test_a_stub_offers_what_its_module_offers(module: str, tmp_path: Path) -> None:
    generated = tmp_path / "generated.pyi"
    command = [sys.executable, "-P", "-m", "nanobind.stubgen", "-q", "-m", module]
    subprocess.run([*command, "-o", str(generated)], check=True, cwd=tmp_path)
    runtime = offered(generated.read_text())
    stub = {
        name: kind
        for name, kind in offered(NATIVE[module].read_text()).items()
        if name in runtime or not aliases(NATIVE[module], name)
    }
    assert sorted(stub) == sorted(runtime)
    unlike = {
        name: (stub[name], runtime[name])
        for name in stub
        if None not in (stub[name], runtime[name]) and stub[name] != runtime[name]
    }
    assert unlike == {}


def aliases(stub: Path, name: str) -> bool:
    """Whether a name of a stub is a type alias, which exists for type checkers alone."""
    return f"\n{name}: TypeAlias" in stub.read_text()
