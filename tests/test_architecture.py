"""Rules of the layout that no linter knows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE_ROOTS = [ROOT / name / "turnfold" for name in ("schemas", "services", "trainer")]

# Files that may do I/O, read the clock or draw a random number.
SHELL_FILES = {"app.py", "__main__.py", "client.py", "cli.py", "testing.py"}
SHELL_FOLDERS = {"backends", "embedded", "log"}

IMPURE_MODULES = {
    "aiokafka",
    "asyncio",
    "faststream",
    "httpx",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "time",
    "urllib",
    "uuid",
    "uvicorn",
}
IMPURE_NAMES = {"open", "input", "print"}
IMPURE_ATTRIBUTES = {
    "environ",
    "getenv",
    "now",
    "read_bytes",
    "read_text",
    "today",
    "utcnow",
    "write_bytes",
    "write_text",
}


def pure_modules() -> list[Path]:
    return [
        path
        for root in SOURCE_ROOTS
        for path in sorted(root.rglob("*.py"))
        if path.name not in SHELL_FILES
        and not SHELL_FOLDERS & set(path.relative_to(root).parts)
        and not is_trainer_shell(path)
    ]


def is_trainer_shell(path: Path) -> bool:
    # verl and the weights on disk are the trainer's backends.
    return path.parent.name == "trainer" and path.stem in {
        "backend",
        "checkpoints",
        "cpu_platform",
        "weights",
    }


def impurities(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [alias.name.split(".")[0] for alias in node.names]
                found += [f"line {node.lineno}: import {n}" for n in names if n in IMPURE_MODULES]
            case ast.ImportFrom() if (node.module or "").split(".")[0] in IMPURE_MODULES:
                found.append(f"line {node.lineno}: from {node.module} import …")
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_NAMES:
                found.append(f"line {node.lineno}: {name}()")
            case ast.Attribute(attr=name) if name in IMPURE_ATTRIBUTES:
                found.append(f"line {node.lineno}: .{name}")
    return found


def test_there_are_pure_modules_to_check() -> None:
    assert len(pure_modules()) > 30


@pytest.mark.parametrize("path", pure_modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_outside_the_shell_is_a_function_of_its_arguments(path: Path) -> None:
    found = impurities(ast.parse(path.read_text()))
    assert not found, f"{path.relative_to(ROOT)} belongs in app.py or must take a value: {found}"


def test_the_check_itself_notices_what_it_should() -> None:
    tree = ast.parse(
        "import time\nfrom httpx import Client\nopen('x')\nimport os\nos.environ\nd.now()"
    )
    assert len(impurities(tree)) == 5


@pytest.mark.parametrize("root", SOURCE_ROOTS, ids=lambda p: p.parent.name)
def test_the_namespace_folder_has_no_init_file(root: Path) -> None:
    # It would hide the other two source roots.
    assert not (root / "__init__.py").exists()


def test_nothing_imports_the_top_level_tests_package() -> None:
    # verl installs a package called `tests`.
    for path in [*ROOT.glob("tests/**/*.py"), *(p for r in SOURCE_ROOTS for p in r.rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "tests", path
