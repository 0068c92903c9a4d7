"""The house rules that a reader would otherwise have to check by hand: sizes, names, declared dependencies."""

import ast
import importlib
import inspect
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("dew", "dew_keras")
MAX_LINES = 600
MAX_STATEMENTS = 50
MAX_DOCSTRING_LINES = 5
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
# Distributions whose import name is not their own name.
IMPORT_NAMES = {"orbax-checkpoint": "orbax", "huggingface-hub": "huggingface_hub"}


def sources(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def statements(function: ast.AST) -> int:
    """Count the statements of a function, those of the functions inside it and their docstrings left out."""
    count = 0
    for child in ast.iter_child_nodes(function):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        count += isinstance(child, ast.stmt) and not is_docstring
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            count += statements(child)
    return count


def public_names(package: str) -> dict[str, list[str]]:
    """Read `__all__` of a package and of the packages inside it."""
    found = {}
    for path in sources(package):
        if path.name == "__init__.py":
            module = ".".join(path.parent.relative_to(ROOT).parts)
            found[module] = list(getattr(importlib.import_module(module), "__all__", ()))
    return found


def test_no_file_is_too_long():
    files = sources(*PACKAGES, "tests", "tools", "examples")
    lengths = {relative(path): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_function_is_too_long():
    long = {}
    for path in sources(*PACKAGES, "tools", "examples"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and statements(node) > MAX_STATEMENTS:
                long[f"{relative(path)}:{node.lineno} {node.name}"] = statements(node)
    assert long == {}


def test_no_file_name_says_nothing():
    assert [relative(path) for path in sources(*PACKAGES, "tests", "tools") if path.stem in VAGUE_NAMES] == []


def test_every_module_opens_with_a_short_docstring():
    wrong = {}
    for path in sources(*PACKAGES, "tools"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        lines = len(docstring.splitlines()) if docstring else 0
        if not 0 < lines <= MAX_DOCSTRING_LINES:
            wrong[relative(path)] = lines
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_shares_the_name_of_a_public_function(package):
    # `from dew.inference import generate` would give the module or the function, whichever was imported last.
    modules = {path.stem for path in sources(package)} | {path.parent.name for path in sources(package)}
    shared = []
    for module, names in public_names(package).items():
        functions = [name for name in names if inspect.isfunction(getattr(importlib.import_module(module), name))]
        shared += [f"{module}.{name}" for name in functions if name in modules]
    assert shared == []


def test_the_public_names_are_those_written_down():
    # A changed line here is a changed interface: note it in CHANGELOG.md and on the page in docs/api.
    got = [
        f"{module}.{name}" for package in PACKAGES for module, names in public_names(package).items() for name in names
    ]
    want = (ROOT / "tests" / "public_names.txt").read_text().split()
    assert sorted(set(got) - set(want)) == [], "not written down in tests/public_names.txt"
    assert sorted(set(want) - set(got)) == [], "written down in tests/public_names.txt, but gone"
    assert len(got) == len(set(got))


def test_every_public_name_has_its_entry_in_the_documentation():
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    entries = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, flags=re.MULTILINE))
    entries |= set(re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE))
    assert sorted(set((ROOT / "tests" / "public_names.txt").read_text().split()) - entries) == []


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + [
        *project["optional-dependencies"]["gguf"],
        *project["optional-dependencies"]["quantization"],
    ]
    names = [re.match(r"[\w-]+", requirement).group() for requirement in declared]
    allowed = {IMPORT_NAMES.get(name, name) for name in names} | set(sys.stdlib_module_names) | set(PACKAGES)
    undeclared = {}
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found = [node.module]
            for name in found:
                if name.split(".")[0] not in allowed:
                    undeclared.setdefault(name.split(".")[0], set()).add(relative(path))
    assert undeclared == {}


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_the_pins_name_every_dependency_and_no_registry(minor):
    text = (ROOT / "constraints" / f"py3{minor}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["test"] + extras["docs"] + extras["gguf"] + extras["quantization"]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in wanted} - {"dew"}
    assert sorted(names - {line.split("==")[0] for line in lines}) == []


def test_the_tree_of_the_readme_lists_every_file_once_with_a_few_words():
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2].split("```text\n")[1].partition("```")[0]
    folders, listed = [], []
    for line in tree.splitlines():
        indent, name, words = re.fullmatch(r"( *)(\S+) +(.+)", line).groups()
        folders = [*folders[: len(indent) // 2], name.rstrip("/")]
        listed.append("/".join(folders))
        assert words
    files = {relative(path) for path in sources(*PACKAGES, "tools", "examples") if path.name != "__init__.py"}
    assert sorted(files - set(listed)) == [], "not in the README's tree"
    assert sorted(name for name in set(listed) if listed.count(name) > 1) == [], "twice in the README's tree"
    assert [name for name in sorted(listed) if not (ROOT / name).exists()] == [], "in the README's tree, but gone"
