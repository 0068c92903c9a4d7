"""Every Python block of the README and of the pages runs as written, in page order.

A block that cannot run here stands below a comment `<!-- not run: REASON -->`; the reason `from PATH` says that it
holds lines of that file. The published model is played by a tiny random one: its name resolves, through a prepared Hub
cache, to a checkpoint in tests/fixtures.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^<!-- not run: from (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPECIFICATION = """\
import jax
from dew.training import MeshSpec, build_mesh

mesh = build_mesh(MeshSpec())
print("Visible devices:", len(jax.devices()))
print("Mesh dimensions:", dict(mesh.shape))
assert mesh.size == len(jax.devices())
"""
"""What must run unchanged on a single device and on many."""


def blocks(page: pathlib.Path) -> list[tuple[int, str]]:
    """List the runnable blocks of a page.

    Args:
        page: A Markdown file.

    Returns:
        Line of the block's first statement and its code, in page order.
    """
    text = page.read_text()
    found = [match for match in BLOCK.finditer(text) if not match["reason"]]
    return [(text[: match.start("code")].count("\n"), match["code"]) for match in found]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, published_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page):
        # Blank lines before the code make a traceback name the page's own line.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_every_python_block_is_found():
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == text.count("```python"), page.name


def test_an_excerpt_is_in_the_file_that_it_names():
    excerpts = [found for page in PAGES for found in EXCERPT.findall(page.read_text())]
    assert len(excerpts) >= 10
    for path, lines in excerpts:
        assert lines in (ROOT / path).read_text(), f"{path} no longer has the lines\n{lines}"


def test_the_pages_show_the_single_device_mesh_and_the_three_meshes():
    code = "\n".join(code for page in PAGES for _, code in blocks(page))
    assert SPECIFICATION in code
    for mesh in ("MeshSpec(fsdp=4)", "MeshSpec(fsdp=2, expert=4)", "MeshSpec(fsdp=4, sequence=2)"):
        assert mesh in code
