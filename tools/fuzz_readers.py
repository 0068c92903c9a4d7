"""Damage valid files at random and read them: `python tools/fuzz_readers.py --seconds 1200 --seed 0 [--only gguf]`.

A reader may give an answer or an error that names the problem, within `CASE_SECONDS` and `CASE_BYTES`. Anything else
is printed and its input kept (`--keep DIRECTORY`); `tests/tools/test_fuzz_readers.py` replays those in tests/fixtures.
"""

import argparse
import copy
import faulthandler
import json
import math
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from dew.data.chat import ChatTemplate
from dew.data.text import Tokenizer
from dew.data.tokenizers.sentencepiece import parse_model, sentencepiece_backend
from dew.pretrained import describe, load_pretrained
from dew.pretrained.fused_experts import split_experts
from dew.pretrained.gguf import GgufFile, GgufSource
from dew.pretrained.mxfp4 import unpacked
from dew.pretrained.safetensors import SafetensorsFile
from dew.pretrained.torch_pickle import TorchFile

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
CASE_SECONDS = 5.0
CASE_BYTES = 512 * 2**20
# What a reader raises for input that it refuses.
REFUSALS = (ValueError, FileNotFoundError)
NUMBERS = (0, 1, 2, 7, 8, 31, 32, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    0.5,
    -0.5,
    1e308,
    2**31,
    2**63,
    10**40,
    "",
    "x",
    "default",
    "llama3",
    [],
    [1],
    {},
    {"a": 1},
)
SNIPPETS = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% for i in range(10**9) %}", "{{ 'a' * 10**9 }}"),
    *("{% set x = x ~ x %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.__class__.__mro__ }}"),
    *("{{ ''.join(messages) }}", "{{ messages | tojson(indent=9) }}", "{% if true %}", "{% endif %}", "{{ cycler }}"),
    *("{{ '%999999999d' % 3 }}", "{{ '{:>999999999}'.format(3) }}", "{{ x|replace('', 'aaaa') }}", "{% include 'x' %}"),
    *(
        "{% set ns = namespace(a=[]) %}",
        "{{ ns.a.append(1) }}",
        "{{ self }}",
        "{{ messages|map('upper')|list }}",
        "{{ 9**9**9 }}",
    ),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{{ raise_exception('x') }}",
        "{{ strftime_now('%Y') }}",
        "{{ lipsum() }}",
    ),
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change bytes in a few places, most of them near the start, where headers are."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(result)
        place = min(int(size * rng.random() ** rng.choice((1, 3))), max(size - 1, 0))
        kind = rng.randrange(7)
        if kind == 0 and size:
            result[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del result[place : place + rng.choice((1, 2, 8, 100, size))]
        elif kind == 3:
            layout = rng.choice(("<B", "<H", "<I", "<Q", ">I"))
            number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(layout))
            result[place : place + struct.calcsize(layout)] = struct.pack(layout, number)
        elif kind == 4:
            source = rng.randrange(size + 1)
            result[place:place] = result[source : source + rng.randrange(64)]
        elif kind == 5:
            result[place : place + 1] = str(rng.choice(NUMBERS)).encode()
        else:
            result[place:place] = rng.choice((b'"', b"{", b"}", b"[", b",", b":", b"\0", b"\xff", b"\n", b"[" * 5000))
    return bytes(result)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Put other values into a JSON text, or change its bytes."""
    if rng.random() < 0.3:
        return mutated(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        inner = value
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.8:
                inner = inner[key]
                continue
            if rng.random() < 0.2:
                del inner[key]
            else:
                inner[key] = copy.deepcopy(rng.choice(VALUES))
            break
    return json.dumps(value).encode()


def mutated_template(data: bytes, rng: random.Random) -> bytes:
    """Put pieces of other templates into one, or change its bytes."""
    if rng.random() < 0.3:
        return mutated(data, rng)
    text = data.decode()
    for _ in range(rng.choice((1, 2, 5))):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(SNIPPETS) + text[place + rng.choice((0, 0, 3, 20)) :]
    return text.encode()


def read_all(source) -> None:
    """Read a corner of every tensor."""
    with np.errstate(all="ignore"):
        for name in source.names():
            shape, _ = source.info(name)
            source.read(name, tuple(slice(0, min(size, 3)) for size in shape))


def read_safetensors(path: Path) -> None:
    read_all(SafetensorsFile(path))


def read_fused(path: Path) -> None:
    read_all(split_experts(SafetensorsFile(path), path))


def read_packed(path: Path) -> None:
    read_all(unpacked(SafetensorsFile(path), path))


def read_gguf(path: Path) -> None:
    file = GgufFile(path)
    read_all(GgufSource(file, str, lambda name, rows: None))
    named = path.with_suffix(".gguf")  # the name says what is described
    named.unlink(missing_ok=True)
    named.hardlink_to(path)
    describe(named)


def read_pickle(path: Path) -> None:
    read_all(TorchFile(path))


def read_pieces(path: Path) -> None:
    model = parse_model(path.read_bytes(), path)
    backend = sentencepiece_backend(model, path, prefix="first", whole_pieces=len(model.pieces) % 2 == 0)
    backend.encode("the quick brown größe 🚂")


def directory_reader(name: str, base: Path, read: Callable[[Path], object]) -> Callable[[Path], None]:
    """Read a copy of a checkpoint in which one file is the damaged one."""

    def run(path: Path) -> None:
        directory = path.parent / f"{base.name}-{name}"
        if not directory.exists():
            shutil.copytree(base, directory)
        shutil.copyfile(path, directory / name)
        read(directory)

    return run


def read_template(path: Path) -> None:
    source = path.read_bytes().decode("utf-8", "surrogateescape")
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " x "}]
    template = ChatTemplate(source=source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    template.render(chat, add_generation_prompt=True, tools=[{"name": "count"}])
    template.assistant_spans(chat)


def fused_seed() -> bytes:
    """A small file with the experts of a layer in one tensor, and another tensor."""
    shapes = {"x.experts.gate_up_proj": [4, 6, 2], "x.experts.down_proj": [4, 2, 3], "x.norm.weight": [2]}
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def gguf_seed() -> bytes:
    """A small file with every kind of metadata value and two tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def key(name: str, kind: int, payload: bytes) -> bytes:
        return text(name) + struct.pack("<I", kind) + payload

    def strings(values: list[str]) -> bytes:
        return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))

    tokens = [f"t{number}" for number in range(8)]
    counts = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 32}
    counts |= {"attention.head_count": 2, "attention.head_count_kv": 2, "rope.dimension_count": 16}
    keys = [key("general.architecture", 8, text("llama")), key("general.alignment", 4, struct.pack("<I", 32))]
    keys += [key(f"llama.{name}", 4, struct.pack("<I", value)) for name, value in counts.items()]
    keys += [key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))]
    keys += [key("tokenizer.ggml.model", 8, text("gpt2")), key("tokenizer.ggml.tokens", 9, strings(tokens))]
    keys += [key("tokenizer.ggml.merges", 9, strings([])), key("tokenizer.ggml.pre", 8, text("gpt-2"))]
    keys += [key("tokenizer.ggml.token_type", 9, struct.pack("<IQ8i", 5, 8, *[1] * 8))]
    keys += [key("tokenizer.ggml.eos_token_id", 10, struct.pack("<Q", 1)), key("other.flag", 7, b"\1")]
    table = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 8, 0, 0)
    table += text("output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 1024)
    table += text("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 32, 32, 8, 1152)
    head = b"GGUF" + struct.pack("<IQQ", 3, 3, len(keys)) + b"".join(keys) + table
    return head + bytes(-len(head) % 32) + bytes(1152 + 32 * 34)


def targets() -> dict[str, tuple[Callable[[Path], None], Callable[[bytes, random.Random], bytes], list[bytes]]]:
    """Name to reader, the way its input is damaged, and valid inputs."""
    words = FIXTURES / "tokenizers"

    def tokenizer(name: str, file_name: str) -> Callable[[Path], None]:
        return directory_reader(
            file_name, words / name, lambda path: Tokenizer.from_directory(path).encode("the größe")
        )

    def config(name: str) -> Callable[[Path], None]:
        return directory_reader("config.json", FIXTURES / name, lambda path: describe(path))

    def tokenizer_json() -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            Tokenizer.from_directory(words / "qwen2").save(directory)
            return (Path(directory) / "tokenizer.json").read_bytes()

    def of(*paths: str) -> list[bytes]:
        return [(FIXTURES / path).read_bytes() for path in paths]

    return {
        "safetensors": (read_safetensors, mutated, of("pickled/same/model.safetensors")),
        "fused": (read_fused, mutated, [fused_seed()]),
        "packed": (read_packed, mutated, of("gpt_oss_mxfp4/model.safetensors")),
        "gguf": (read_gguf, mutated, [gguf_seed()]),
        "pickle": (read_pickle, mutated, of("pickled/odd.bin", "pickled/module.bin")),
        "pieces": (
            read_pieces,
            mutated,
            of("tokenizers/pieces_bpe/tokenizer.model", "tokenizers/unigram/tokenizer.model"),
        ),
        "ranks": (tokenizer("tiktoken", "tokenizer.model"), mutated, of("tokenizers/tiktoken/tokenizer.model")),
        "merges": (tokenizer("gpt2", "merges.txt"), mutated, of("tokenizers/gpt2/merges.txt")),
        "vocab": (tokenizer("gpt2", "vocab.json"), mutated_json, of("tokenizers/gpt2/vocab.json")),
        "tokenizer": (tokenizer("qwen2", "tokenizer.json"), mutated_json, [tokenizer_json()]),
        "words": (
            tokenizer("tiktoken", "tokenizer_config.json"),
            mutated_json,
            of("tokenizers/tiktoken/tokenizer_config.json"),
        ),
        "config": (config("llama"), mutated_json, of("llama/config.json")),
        "scaling": (config("llama_untied"), mutated_json, of("llama_untied/config.json")),
        "load": (
            directory_reader("config.json", FIXTURES / "pickled" / "same", load_pretrained),
            mutated_json,
            of("pickled/same/config.json"),
        ),
        "template": (
            read_template,
            mutated_template,
            [path.read_bytes() for path in sorted((words / "templates").glob("*.jinja"))],
        ),
    }


def failure(read: Callable[[Path], None], path: Path) -> str | None:
    """Read one input; say what went wrong if it is more than a refusal."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    problem = None
    try:
        read(path)
    except REFUSALS as error:
        if not str(error):
            problem = f"{type(error).__name__} without a word"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = "".join(traceback.format_exception_only(error)).strip() + "\n" + traceback.format_exc(limit=-4)
    seconds = time.monotonic() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if problem is None and seconds > CASE_SECONDS:
        problem = f"took {seconds:.1f} s"
    if problem is None and grown > CASE_BYTES:
        problem = f"took {grown / 2**20:.0f} MiB"
    return problem


def run(names: list[str], seconds: float, seed: int, keep: Path | None, limit: int | None = None) -> dict[str, int]:
    """Damage and read, each target in turn, until the time or the number of cases is used up.

    Args:
        names: Targets.
        seconds: For all of them.
        seed: Of the damage.
        keep: Where failing inputs go.
        limit: Most cases of a target.

    Returns:
        Target to the number of failures.
    """
    known, failures = targets(), dict.fromkeys(names, 0)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            read, damage, seeds = known[name]
            rng, path = random.Random(f"{seed} {name}"), Path(scratch) / f"{name}.bin"
            for valid in seeds:
                path.write_bytes(valid)
                assert (problem := failure(read, path)) is None, f"{name}: a valid input fails: {problem}"
            end, cases = time.monotonic() + seconds / len(names), 0
            while time.monotonic() < end and (limit is None or cases < limit):
                data = damage(rng.choice(seeds), rng)
                path.unlink()  # a new file: a mapped one must not shrink
                path.write_bytes(data)
                faulthandler.dump_traceback_later(20 * CASE_SECONDS, exit=True, file=sys.__stderr__)
                problem = failure(read, path)
                faulthandler.cancel_dump_traceback_later()
                cases += 1
                if problem is not None:
                    failures[name] += 1
                    print(f"{name} case {cases}: {problem}")
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{name}-{seed}-{cases}.bin").write_bytes(data)
            print(f"{name}: {cases} cases, {failures[name]} failures")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=sorted(targets()))
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    given = parser.parse_args()
    return 1 if any(run(given.only, given.seconds, given.seed, given.keep).values()) else 0


if __name__ == "__main__":
    sys.exit(main())
