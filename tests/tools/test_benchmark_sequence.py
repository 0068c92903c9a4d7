"""The benchmark of exchanges measures each call on as many devices as it is told, and counts what the formulas say."""

from dew.parallel.choice import choose_exchange
from dew.parallel.traffic import AttentionSizes
from tools.benchmark_sequence import KINDS, main


def test_each_exchange_is_a_row_with_the_bytes_of_its_formula(capsys):
    sizes = {"length": 32, "width": 8, "window": 8}
    given = {"shards": 4, "heads": 4, "kv-heads": 2, "samples": 1, **sizes}
    main([word for name, size in given.items() for word in (f"--{name}", str(size))])
    header, _, *lines = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert {len(row) for row in lines} == {len(header)}
    assert len(lines) == sum(1 + len(paths) for _, paths in KINDS.values())
    for call, path, *_, sent, _ in lines:
        window = None if call == "causal" else 8
        facts = {"rows": 1, "num_queries": 32, "num_keys": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        split = AttentionSizes(**facts, dtype="float32", shards=4, window=window)
        want = 0 if path == "one device" else choose_exchange(split, path).bytes / 2**10
        if (path, window) == ("ring", 8):
            # One hop is no loop: compiled, the backward pass takes the keys that the forward pass received.
            want -= 2 * split.key_bytes / 2**10
        assert sent == f"{want:,.0f}", (call, path)
