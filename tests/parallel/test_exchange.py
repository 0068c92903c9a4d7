"""Every exchange of attention gives the values and gradients of one device, and sends what its formula says."""

import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dew.kernels.attention import attention
from dew.kernels.attention_choice import Accelerator
from dew.kernels.dropout import AttentionDropout, Dropout
from dew.nn.masks import causal_visibility, layer_limits, limited
from dew.parallel.choice import choose_exchange, exchange_refusal, skips_window, with_length
from dew.parallel.exchange import KEY_NAMES, QUERY_NAMES, sequence_attention
from dew.parallel.traffic import AttentionSizes
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES, resolve
from tests.parallel.sequences import packed_segments
from tests.parallel.traced import traced_bytes
from tools.collectives import collectives

B, T, H = 8, 48, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention on one mesh."""

    mesh: MeshSpec
    path: str
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    packed: bool = True
    rows_are_alike: bool = False
    named: str = "auto"
    dtype: str = "float32"


CASES = {
    "trade": Case(mesh=MeshSpec(sequence=2), path="all_to_all", sinks=True, softcap=3.0),
    "trade repeated kv heads": Case(
        mesh=MeshSpec(sequence=8), path="all_to_all", heads=16, kv_heads=2, sinks=True, dropout=0.3
    ),
    "trade over tensor, few kv heads": Case(
        mesh=MeshSpec(tensor=2, sequence=2), path="all_to_all", heads=12, kv_heads=3, sinks=True, dropout=0.3
    ),
    "trade a wide window": Case(mesh=MeshSpec(sequence=4), path="all_to_all", window=20, rows_are_alike=True),
    "trade chunks": Case(
        mesh=MeshSpec(sequence=2), path="all_to_all", window=7, chunk=9, packed=False, named="all_to_all"
    ),
    "gather": Case(mesh=MeshSpec(sequence=8), path="gather", sinks=True, softcap=3.0),
    "gather over tensor, one kv head": Case(
        mesh=MeshSpec(tensor=2, sequence=4), path="gather", kv_heads=1, dropout=0.3
    ),
    "gather unpacked": Case(mesh=MeshSpec(fsdp=4, sequence=2), path="gather", heads=3, kv_heads=3, packed=False),
    "gather a window": Case(mesh=MeshSpec(sequence=8), path="gather", window=12, named="gather"),
    "gather of chunks": Case(mesh=MeshSpec(sequence=4), path="gather", chunk=9, packed=False, named="gather"),
    "ring": Case(mesh=MeshSpec(sequence=8), path="ring", named="ring", sinks=True, softcap=3.0, dropout=0.3),
    "ring over tensor, one kv head": Case(
        mesh=MeshSpec(tensor=2, sequence=4), path="ring", named="ring", kv_heads=1, packed=False
    ),
    "ring of a window": Case(mesh=MeshSpec(sequence=8), path="ring", window=10, sinks=True, softcap=3.0, dropout=0.3),
    "ring of chunks": Case(mesh=MeshSpec(sequence=8), path="ring", chunk=9),
    "ring of chunks unpacked": Case(
        mesh=MeshSpec(sequence=8), path="ring", window=8, chunk=9, packed=False, named="ring"
    ),
    "band": Case(mesh=MeshSpec(sequence=4), path="banded", window=9, sinks=True, softcap=3.0, dropout=0.3),
    "band unpacked": Case(mesh=MeshSpec(fsdp=2, sequence=2), path="banded", window=25, packed=False, dropout=0.3),
    "band of chunks": Case(mesh=MeshSpec(tensor=2, sequence=4), path="banded", window=7, chunk=9),
    "band of chunks across slices": Case(
        mesh=MeshSpec(sequence=8), path="banded", chunk=9, packed=False, heads=3, kv_heads=3
    ),
    "chunks that end with slices": Case(mesh=MeshSpec(sequence=8), path="banded", chunk=3, packed=False),
}
NARROW = {
    "trade": Case(mesh=MeshSpec(sequence=2), path="all_to_all", dtype="bfloat16"),
    "gather": Case(mesh=MeshSpec(sequence=8), path="gather", dtype="bfloat16"),
    "ring": Case(mesh=MeshSpec(sequence=8), path="ring", named="ring", dtype="bfloat16"),
    "band": Case(mesh=MeshSpec(sequence=4), path="banded", window=9, dtype="bfloat16"),
}
"""One case of each exchange in a dtype whose sums are kept in another."""


@functools.cache
def operands(heads: int, kv_heads: int, dtype: str = "float32") -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    query, cotangent = (jax.random.normal(key, (B, T, heads, H)) for key in keys[:2])
    key, value = (jax.random.normal(key, (B, T, kv_heads, H)) for key in keys[2:4])
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    return query, key, value, jax.random.normal(keys[4], (heads,)), cotangent


def dropout_of(case: Case) -> AttentionDropout | None:
    return Dropout.of_batch(jax.random.key(1), B, attention_rate=case.dropout).of_attention(case.heads)


def loss(case: Case, attend: Any):
    """Build the function of (query, key, value, sinks, cotangent, segments) to differentiate."""

    def run(query, key, value, sinks, cotangent, segments):
        visibility = limited(causal_visibility(T, segments), window=case.window, chunk=case.chunk)
        sinks = sinks if case.sinks else None
        options = {"softcap": case.softcap, "sinks": sinks, "dropout": dropout_of(case)}
        mixed = attend(query, key, value, visibility=visibility, scale=H**-0.5, **options)
        return jnp.sum(mixed * cotangent), mixed

    return jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True)


def on_one_device(query, key, value, **rest):
    return attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), **rest)


def segments_of(case: Case) -> np.ndarray | None:
    if not case.packed:
        return None
    return packed_segments(length=T)[: 1 if case.rows_are_alike else B]


@functools.cache
def wanted(case: Case):
    return jax.jit(loss(case, on_one_device))(*operands(case.heads, case.kv_heads, case.dtype), segments_of(case))


@functools.cache
def compiled(case: Case):
    """Compile a case on its mesh; the placed operands and the program."""
    mesh = build_mesh(case.mesh)
    query, key, value, sinks, cotangent = operands(case.heads, case.kv_heads, case.dtype)

    def placed(x, names):
        return jax.device_put(x, NamedSharding(mesh, resolve(names, x.shape, mesh, DEFAULT_RULES).spec))

    whole = jax.device_put(sinks, NamedSharding(mesh, PartitionSpec()))
    pairs = placed(key, KEY_NAMES), placed(value, KEY_NAMES)
    arguments = [placed(query, QUERY_NAMES), *pairs, whole, placed(cotangent, QUERY_NAMES), segments_of(case)]
    if case.packed:
        arguments[-1] = placed(arguments[-1], ("activation_batch", "activation_length"))
    with jax.set_mesh(mesh):
        return arguments, jax.jit(exchanged(case)).lower(*arguments).compile()


def exchanged(case: Case):
    return loss(case, functools.partial(sequence_attention, sequence_impl=case.named))


def sizes(case: Case) -> AttentionSizes:
    tensor, shards = case.mesh.tensor, case.mesh.sequence
    heads = case.heads // tensor
    window, chunk = layer_limits(case.window, case.chunk, in_documents=case.packed)
    kv_heads = (
        case.kv_heads // tensor if case.kv_heads % tensor == 0 else heads // np.gcd(heads, case.heads // case.kv_heads)
    )
    return AttentionSizes(
        rows=B // (8 // tensor // shards),
        num_queries=T,
        num_keys=T,
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=H,
        dtype=case.dtype,
        shards=shards,
        is_masked=case.packed,
        has_sinks=case.sinks,
        has_softcap=case.softcap is not None,
        window=window,
        chunk=chunk,
    )


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name):
    case = CASES[name]
    arguments, program = compiled(case)
    (_, mixed), gradients = program(*arguments)
    (_, want_mixed), want_gradients = wanted(dataclasses.replace(case, mesh=MeshSpec(), path="", named="auto"))
    np.testing.assert_allclose(mixed, want_mixed, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(want_mixed))))
    for got, want in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(want))))
    assert all(float(jnp.max(jnp.abs(want))) > 0.1 for want in want_gradients[: 4 if case.sinks else 3])


def test_heads_that_rules_split_in_different_ways_read_their_own_keys():
    case = Case(mesh=MeshSpec(tensor=2, sequence=2), path="all_to_all", packed=False)
    query, key, value, sinks, cotangent = operands(case.heads, case.kv_heads)
    whole_queries = (("activation_heads", None), *(rule for rule in DEFAULT_RULES if rule[0] != "activation_heads"))
    with jax.set_mesh(build_mesh(case.mesh)), nn.logical_axis_rules(whole_queries):
        (_, mixed), _ = jax.jit(loss(case, sequence_attention))(query, key, value, sinks, cotangent, None)
    (_, want), _ = wanted(dataclasses.replace(case, mesh=MeshSpec(), path=""))
    np.testing.assert_allclose(mixed, want, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(want))))


def travelling(case: Case):
    """List what devices send each other; a collective without axes moves nothing."""
    found = collectives(compiled(case)[1].as_text(), dict(build_mesh(case.mesh).shape))
    return [item for item in found if item.axes]


def is_exchanged(item: Any) -> bool:
    """Whether a collective moves heads of tokens over sequence, in place of summing them."""
    return item.kind != "all-reduce" and item.axes == ("sequence",) and len(item.shapes[0]) > 2


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_is_what_the_formula_says(name):
    case = CASES[name]
    choice = choose_exchange(sizes(case), case.named)
    assert choice.path == case.path
    found: collections.Counter[str] = collections.Counter()
    for item in travelling(case):
        if is_exchanged(item):
            found[item.kind] += item.step_bytes
    want: collections.Counter[str] = collections.Counter()
    for transfer in choice.transfers:
        want[transfer.kind] += transfer.result_bytes
    assert found == +want
    assert bool(found) == (name != "chunks that end with slices")


@pytest.mark.parametrize("name", NARROW)
def test_values_and_gradients_in_bfloat16_are_those_of_one_device_in_float32(name):
    case = NARROW[name]
    arguments, program = compiled(case)
    (_, mixed), gradients = program(*arguments)
    query, key, value, sinks, cotangent = operands(case.heads, case.kv_heads, case.dtype)
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    (_, want_mixed), want_gradients = jax.jit(loss(case, on_one_device))(*wide, sinks, cotangent, segments_of(case))
    for got, want in zip((mixed, *gradients[:3]), (want_mixed, *want_gradients[:3]), strict=True):
        assert got.dtype == jnp.bfloat16
        got = np.asarray(got.astype(jnp.float32))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize("name", NARROW)
def test_what_is_sent_in_bfloat16_is_what_the_formula_says(name):
    # Of the traced program: compiled for CPU, collectives are widened.
    case = NARROW[name]
    mesh = build_mesh(case.mesh)
    with jax.set_mesh(mesh):
        arguments = (*operands(case.heads, case.kv_heads, case.dtype), segments_of(case))
        found = traced_bytes(jax.make_jaxpr(exchanged(case))(*arguments))
    want: collections.Counter[str] = collections.Counter()
    for transfer in choose_exchange(sizes(case), case.named).transfers:
        want[transfer.kind] += transfer.result_bytes
    assert found == want


@pytest.mark.parametrize("name", CASES)
def test_nothing_else_is_sent_but_document_numbers_the_loss_and_gradients_of_what_is_whole(name):
    case = CASES[name]
    call, mesh = sizes(case), build_mesh(case.mesh).shape
    others = [
        (item.kind, item.axes, shape) for item in travelling(case) if not is_exchanged(item) for shape in item.shapes
    ]
    split = [axis for axis in mesh if mesh[axis] > 1]
    scalars = [axes for kind, axes, shape in others if (kind, shape) == ("all-reduce", ())]
    assert sorted(itertools.chain(*scalars)) == sorted(split), "the loss is summed over every axis once"
    want: collections.Counter[Any] = collections.Counter()
    if case.packed:
        want["all-gather", ("sequence",), (1 if case.rows_are_alike else call.rows, T)] += 1
    if case.sinks:
        rows_and_positions = tuple(axis for axis in split if axis != "tensor")
        want["all-reduce", rows_and_positions, (call.num_heads,)] += 1
    if case.kv_heads % case.mesh.tensor:
        want["all-reduce", ("tensor",), (call.rows, call.slice_length, case.kv_heads, H)] += 2
    assert collections.Counter(other for other in others if other[2] != ()) == want


HOPPER = Accelerator(platform="cuda", capability=(9, 0), cudnn=90800)
TPU, CPU = Accelerator(platform="tpu"), Accelerator(platform="cpu")
FACTS = {
    "rows": 2,
    "num_queries": 64,
    "num_keys": 64,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dtype": "bfloat16",
    "shards": 4,
}


@pytest.mark.parametrize(
    "change, path, reason",
    [
        ({"num_heads": 4}, "all_to_all", "skips what is hidden"),
        ({"num_heads": 6}, "gather", "too few to trade; sends least"),
        ({"num_heads": 32, "num_kv_heads": 1, "is_masked": True}, "all_to_all", "is hidden"),
        ({"num_heads": 4, "window": 17}, "banded", "one slice"),
        ({"num_heads": 4, "window": 17, "kernel": True}, "all_to_all", "is hidden"),
        ({"num_heads": 6, "window": 17, "kernel": True}, "banded", "one slice"),
        ({"num_heads": 4, "window": 18}, "all_to_all", "is hidden"),
        ({"num_heads": 4, "chunk": 32}, "banded", "one slice"),
        ({"num_heads": 4, "chunk": 40}, "all_to_all", "is hidden"),
        ({"num_heads": 16, "num_kv_heads": 16, "window": 18, "shards": 32, "num_queries": 512}, "ring", "sends least"),
        # 36 positions: slices of 9 have no halves, so nothing can be striped.
        ({"num_heads": 4, "num_queries": 36, "num_keys": 36}, "all_to_all", "is hidden"),
    ],
)
def test_the_choice_follows_the_rules(change, path, reason):
    change = dict(change)
    device = HOPPER if change.pop("kernel", False) else CPU
    facts = {**FACTS, **change}
    facts["num_keys"] = facts["num_queries"]
    choice = choose_exchange(AttentionSizes(**facts), device=device)
    assert choice.path == path
    assert reason in choice.reason
    assert set(choice.refused) | set(choice.alternatives) | {path} == {"all_to_all", "gather", "ring", "banded"}
    assert f"{path}, {choice.bytes:,} bytes a device" in str(choice)


@pytest.mark.parametrize(
    "named, change, message",
    [
        (
            "all_to_all",
            {"num_heads": 6},
            "6 query heads of a tensor shard .*sequence=4. Use sequence_impl='auto' or 'gather' or 'ring'.$",
        ),
        ("banded", {"num_heads": 4}, "it needs a window or chunks"),
        ("banded", {"num_heads": 4, "window": 18}, "reads 17 positions before its slice, which is longer"),
        # Slices of 17 hold what a window of 18 reads before them.
        ("banded", {"num_heads": 4, "window": 18}, "Use sequence_impl=.*, or rows of 68 positions.$"),
        (
            "ring",
            {"num_heads": 4, "num_queries": 36},
            "36 positions do not divide into 8 .*Use sequence_impl='auto' or 'all_to_all', or rows of 32 or 40 pos",
        ),
        ("gather", {"num_heads": 6, "num_queries": 36}, "36 positions do not divide into 8 .* Use rows of 32 or 40 "),
        ("auto", {"num_heads": 6, "num_queries": 36}, "36 positions do not divide into 8 .* Use rows of 32 or 40 "),
        ("auto", {"num_heads": 4, "num_queries": 38}, "38 positions do not divide into 4 .* Use rows of 36 or 40 "),
        ("auto", {"num_heads": 6, "num_queries": 3}, "3 positions do not divide into 8 .* Use rows of 8 positions"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(named, change, message):
    facts = {**FACTS, **change}
    with pytest.raises(LayoutRefused, match=message):
        choose_exchange(AttentionSizes(**{**facts, "num_keys": facts["num_queries"]}), named)


@pytest.mark.parametrize(
    "change, device, skips",
    [
        ({}, HOPPER, True),
        ({"is_masked": True}, HOPPER, False),
        ({"has_sinks": True}, HOPPER, False),
        ({"dtype": "float32"}, HOPPER, False),
        ({"num_heads": 6}, HOPPER, False),
        ({"window": None}, HOPPER, False),
        ({}, CPU, False),
    ],
)
def test_a_kernel_with_a_window_of_its_own_is_known(change, device, skips):
    facts = {**FACTS, "num_heads": 4, "window": 17, **change}
    assert skips_window(AttentionSizes(**facts), "auto", device) is skips


@pytest.mark.parametrize(
    "change, implementation, device, path",
    [
        # A window would take the band, which leaves what the kernel named cannot attend.
        ({"num_heads": 4, "window": 17, "is_masked": True}, "cudnn", HOPPER, "all_to_all"),
        ({"num_heads": 4, "window": 17, "is_masked": True}, "xla", HOPPER, "banded"),
        ({"num_heads": 4, "chunk": 48, "num_queries": 512, "head_dim": 64}, "tpu", TPU, "all_to_all"),
    ],
)
def test_a_kernel_named_takes_an_exchange_that_leaves_it_what_it_can_run(change, implementation, device, path):
    facts = {**FACTS, **change}
    facts["num_keys"] = facts["num_queries"]
    choice = choose_exchange(AttentionSizes(**facts), implementation=implementation, device=device)
    assert (choice.path, choice.kernel.kernel) == (path, implementation)
    by_default = choose_exchange(AttentionSizes(**facts), device=CPU).path
    assert (by_default == path) == (implementation == "xla")
    assert f"; kernel {implementation}" in str(choice)


@pytest.mark.parametrize("kernel, device", [("tpu", TPU), ("cudnn", HOPPER)])
def test_chunks_that_end_with_slices_leave_rows_that_compiled_kernels_run(kernel, device):
    facts = {**FACTS, "num_heads": 4, "num_queries": 512, "num_keys": 512, "head_dim": 64}
    for chunk, inside in ((64, kernel), (48, "xla")):
        choice = choose_exchange(AttentionSizes(**facts, chunk=chunk), device=device)
        assert (choice.path, choice.kernel.kernel) == ("banded", inside)


def test_a_kernel_that_no_exchange_can_run_is_refused_with_every_reason():
    query, key, value, *_ = operands(4, 2)
    reasons = (
        r"with attention_impl='cudnn': all_to_all cannot: 4 query heads .* gather cannot: it attends piece by piece.* "
        r"ring cannot: it attends piece.* banded cannot: it needs a window or chunks. Use attention_impl='auto'\.$"
    )
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))), pytest.raises(LayoutRefused, match=reasons):
        sequence_attention(query, key, value, visibility=causal_visibility(T), scale=1.0, implementation="cudnn")


@settings(max_examples=30, deadline=None)
@given(
    facts=st.fixed_dictionaries(
        {
            "num_queries": st.integers(1, 200),
            "num_heads": st.sampled_from([1, 3, 4, 6, 8]),
            "num_kv_heads": st.just(1),
            "shards": st.sampled_from([2, 3, 4, 8]),
            "is_masked": st.booleans(),
            "window": st.sampled_from([None, 1, 9, 100]),
            "chunk": st.sampled_from([None, 7, 32, 50]),
        }
    ),
    named=st.sampled_from(["auto", "all_to_all", "gather", "ring", "banded"]),
    kernel=st.sampled_from([("auto", CPU), ("xla", CPU), ("cudnn", HOPPER), ("tpu", TPU), ("cudnn", CPU)]),
)
def test_whatever_length_is_advised_is_accepted(facts, named, kernel):
    implementation, device = kernel
    sizes = AttentionSizes(**{**FACTS, **facts, "num_keys": facts["num_queries"], "head_dim": 64})

    def refusal(sizes, named=named, implementation=implementation):
        return exchange_refusal(sizes, named, implementation=implementation, device=device)

    if refusal(sizes) is None:
        choose_exchange(sizes, named, implementation=implementation, device=device)
        return
    with pytest.raises(LayoutRefused) as refused:
        choose_exchange(sizes, named, implementation=implementation, device=device)
    advice = str(refused.value).rpartition(" Use ")[2]
    rows = re.search(r"rows of ([\d or]+) positions", advice)
    lengths = [int(number) for number in re.findall(r"\d+", rows[1])] if rows else []
    for length in lengths:
        assert length != sizes.num_queries
        assert refusal(with_length(sizes, length)) is None
    between = range(max([0, *(size for size in lengths if size < sizes.num_queries)]) + 1, sizes.num_queries)
    assert all(refusal(with_length(sizes, length)) is not None for length in between if length % sizes.shards == 0)
    for path in re.findall(r"'(\w+)'", advice.partition(", or")[0]) if "sequence_impl" in advice else []:
        assert refusal(sizes, named=path) is None
    if "attention_impl='auto'" in advice:
        assert refusal(sizes, implementation="auto") is None


def test_rules_that_split_positions_otherwise_are_refused():
    query, key, value, *_ = operands(4, 2)
    rules = (*((n, a) for n, a in DEFAULT_RULES if n != "activation_length"), ("activation_length", "data"))
    rules = (*((n, a) for n, a in rules if n != "activation_batch"), ("activation_batch", None))
    with (
        jax.set_mesh(build_mesh(MeshSpec(sequence=4))),
        nn.logical_axis_rules(rules),
        pytest.raises(LayoutRefused, match="rules put activation_length on data, but attention splits positions over"),
    ):
        sequence_attention(query, key, value, visibility=causal_visibility(T), scale=1.0)
