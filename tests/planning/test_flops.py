"""Operations read from compiled programs whose count is known, and the formula of a decoder's step."""

import jax
import jax.numpy as jnp
import pytest

from dew.planning.flops import matrix_products, program_flops
from dew.planning.hlo import array_shapes, computations


def text(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_a_product_is_two_operations_per_element_and_summand():
    (product,) = matrix_products(text(lambda a, b: a @ b, (3, 5), (5, 7)))
    assert (product.shape, product.contracted, product.trips) == ((3, 7), 5, ())
    assert product.flops == 2 * 3 * 5 * 7


def test_products_with_batch_dimensions_and_several_summed_ones():
    found = text(lambda a, b: jnp.einsum("BTKH,BSKH->BTS", a, b), (2, 3, 4, 5), (2, 7, 4, 5))
    assert program_flops(found) == 2 * (2 * 3 * 7) * (4 * 5)


def test_a_loop_counts_as_often_as_it_runs():
    def nested(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=3)[0] + 1, None

        return jax.lax.scan(outer, x, length=5)[0]

    found = text(nested, (4, 8), (8, 8))
    assert program_flops(found) == 15 * 2 * 4 * 8 * 8
    # XLA's own analysis counts the body of a loop once.
    assert [product.trips for product in matrix_products(found)] == [(5, 3)]


def test_a_gradient_costs_twice_the_forward():
    def loss(w1, w2, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w1) @ w2))

    shapes = (8, 16), (16, 4), (32, 8)
    forward = 2 * 32 * (8 * 16 + 16 * 4)
    assert program_flops(text(loss, *shapes)) == forward
    by_all = jax.grad(lambda *arguments: loss(*arguments), argnums=(0, 1, 2))
    assert program_flops(text(by_all, *shapes)) == 3 * forward


def test_a_triangular_system_counts_half_its_rows_for_each_of_its_columns():
    def solve(a, b):
        return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True, unit_diagonal=True)

    assert program_flops(text(solve, (3, 16, 16), (3, 16, 5))) == 2 * (3 * 16 * 5) * 8


def test_both_branches_of_a_conditional_count():
    def choose(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: (x @ w).sum(), lambda: (x.T @ x).sum())

    # Operands of a branch are opaque to XLA, so neither product is simplified.
    assert program_flops(text(choose, (4, 6), (6, 5))) == 2 * (4 * 5 * 6 + 6 * 6 * 4)


CUBLAS = """
ENTRY %main (a: f32[4,6], b: f32[6,5]) -> f32[4,5] {
  %a = f32[4,6]{1,0} parameter(0)
  %b = f32[6,5]{1,0} parameter(1)
  %call = (f32[4,5]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %out = f32[4,5]{1,0} get-tuple-element(%call), index=0
}
"""  # noqa: E501


def test_a_librarys_product_is_read_from_its_call():
    assert program_flops(CUBLAS) == 2 * 4 * 5 * 6
    with_types = CUBLAS.replace("custom-call(%a, %b)", "custom-call(f32[4,6]{1,0} %a, f32[6,5]{1,0} %b)")
    assert program_flops(with_types) == 2 * 4 * 5 * 6


@pytest.mark.parametrize(
    "text, message",
    [
        (CUBLAS.replace("__cublas$gemm", "__cudnn$fmhaSoftmax").replace("lhs_contracting", "x"), "'__cudnn\\$fmhaSoft"),
        (CUBLAS.replace("custom-call(", "convolution("), "Convolutions are not counted: call"),
        ("hello", "no ENTRY computation"),
    ],
)
def test_what_cannot_be_counted_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        program_flops(text)


def test_programs_are_read_as_written():
    found, entry = computations(CUBLAS)
    assert entry == "main"
    call = found["main"][2]
    assert (call.opcode, call.operands, call.op_name) == ("custom-call", ("a", "b"), "")
    assert array_shapes(call.result) == [("f32", (4, 5)), ("s8", (1024,))]
