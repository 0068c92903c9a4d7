"""Floating-point operations of a training step: what its compiled program does, and what it needs to.

Entry points: `matrix_products` and `program_flops` read a program, `decoder_step_flops` is the formula. Only matrix
products count, and systems solved by them: the rest is a few per cent of a model, and accelerators do it elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from dew.kernels import delta_rule, ssd
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.latent_attention import LatentAttentionSpec, attention_form
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.planning.hlo import Instruction, Trips, array_shapes, computations, running_instructions
from dew.tree import named_leaves

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LIBRARY_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIANGULAR_SOLVE = re.compile(r"trsm|triangular", re.IGNORECASE)
_LIBRARY_PRODUCT = re.compile(r"gemm|matmul|conv|fmha|attention", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product of a compiled program.

    Attributes:
        shape: Shape of the result on one device.
        contracted: Elements summed for each element of it; of a triangular system half of its rows, as on average.
        trips: Trip count of each loop around it, outermost first; None where the compiler does not know it.
        op_name: Where it comes from, as JAX named it.
    """

    shape: tuple[int, ...]
    contracted: int
    trips: Trips
    op_name: str

    @property
    def flops(self) -> int:
        """Operations of one device in one run of the program; a loop of unknown length counts once."""
        return 2 * math.prod(self.shape) * self.contracted * math.prod(trip or 1 for trip in self.trips)


def matrix_products(text: str) -> list[Product]:
    """List the matrix products of an optimised program.

    Args:
        text: The module, as `compiled.as_text()` gives it.

    Returns:
        The products of one device; both branches of a conditional count.

    Raises:
        ValueError: If the text has no entry computation, or calls a library's product that cannot be read.
    """
    found, entry = computations(text)
    named = {name: {item.name: item for item in items} for name, items in found.items()}
    products = []
    for instruction, trips in running_instructions(found, entry):
        solves, dims = _is_triangular_solve(instruction), _contracted_dims(instruction)
        if dims is None and not solves:
            continue
        left = named[instruction.computation][instruction.operands[0]]
        ((_, sizes),) = array_shapes(left.result)
        products.append(
            Product(
                shape=array_shapes(instruction.result)[0][1],
                contracted=sizes[-1] // 2 if solves else math.prod(sizes[dim] for dim in dims or ()),
                trips=trips,
                op_name=instruction.op_name,
            )
        )
    return products


def _target(instruction: Instruction) -> str:
    """Name the library's function that an instruction calls, or nothing."""
    written = _TARGET.search(instruction.line) if instruction.opcode == "custom-call" else None
    return written[1] if written else ""


def _is_triangular_solve(instruction: Instruction) -> bool:
    return instruction.opcode == "triangular-solve" or bool(_TRIANGULAR_SOLVE.search(_target(instruction)))


def _contracted_dims(instruction: Instruction) -> list[int] | None:
    """Dimensions of the first operand that are summed over; None where the instruction is no matrix product."""
    if instruction.opcode == "dot":
        written = _CONTRACTED.search(instruction.line)
        return [int(dim) for dim in re.findall(r"\d+", written[1])] if written else []
    if instruction.opcode == "convolution":
        raise ValueError(f"Convolutions are not counted: {instruction.name} from {instruction.op_name!r}.")
    target = _target(instruction)
    if not _LIBRARY_PRODUCT.search(target):
        return None
    written = _LIBRARY_CONTRACTED.search(instruction.line)
    if written is None:
        raise ValueError(
            f"The program calls {target!r} from {instruction.op_name!r}, whose operations cannot be read from its "
            "text. Count a program that keeps its products as dots: on CPU, or with attention_impl='xla'."
        )
    return [int(dim) for dim in re.findall(r"\d+", written[1])]


def program_flops(text: str) -> int:
    """Count the operations of all matrix products that one device does in one run of a program.

    Args:
        text: The module, as `compiled.as_text()` gives it.

    Raises:
        ValueError: As `matrix_products`.
    """
    return sum(product.flops for product in matrix_products(text))


def decoder_step_flops(module: Any, variables: Any, *, rows: int, length: int, slices: int = 1) -> int:
    """Compute what a training step of a decoder needs, on all devices together, without recomputation of blocks.

    Each weight of a matrix multiplies each token once forward and twice backward, two operations each: 6 a weight and
    token (https://arxiv.org/abs/2001.08361, section 2.1). The table counts as the head that scores the vocabulary; a
    lookup multiplies nothing. Of a layer's experts each token reads top_k, whose three matrices count for it; a dense
    dispatch, which computes every expert for every token, would do num_experts / top_k times as many. Each query and
    key meet once forward and twice backward, and so do the pair's weight and value, hidden pairs included: 12 H a pair
    and query head, 6 (H + the value's width) where latents are expanded. Scans cost what `dew.kernels.ssd` and
    `dew.kernels.delta_rule` say, slices of a row beside it what `dew.parallel.ssm_scan` and `delta_scan` do. Layers
    that predict further tokens count like the others, each with the head once more.

    Args:
        module: A `CausalTransformer`.
        variables: Its variables, or their shapes, unboxed.
        rows: Rows of the global batch.
        length: Positions of a row.
        slices: Parts of the rows of scans, the size of a sequence axis.

    Returns:
        Operations of one step.
    """
    tables = ("embed_positions", *(() if module.tie_embeddings else ("embed_tokens",)))
    weights = sum(
        math.prod(leaf.shape)
        for path, leaf in named_leaves(variables["params"]).items()
        if path.endswith(("kernel", "embedding")) and not path.startswith(tables) and "_conv/" not in path
    )
    layers = module.training_layers
    pairs = sum(_pair_products(spec) for spec in layers if attention_form(spec.mixer)) * length
    scans = sum(_scan_products(spec.mixer, length, slices) for spec in layers)
    experts = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsSpec)]
    weights += sum(3 * spec.router.top_k * module.features * spec.features for spec in experts)
    if module.prediction is not None:
        again = module.prediction.depth - 1 if module.prediction.is_shared else 0
        weights += (module.prediction.depth * module.vocab_size + again * 2 * module.features) * module.features
    return 6 * rows * length * (weights + pairs) + 2 * rows * scans


def _pair_products(layer: Any) -> int:
    """Count the products of one query and key in all heads, and of its weight and the value."""
    if isinstance(layer.mixer, LatentAttentionSpec):
        return layer.mixer.num_heads * (layer.mixer.qk_head_dim + layer.mixer.v_head_dim)
    return 2 * layer.attention.num_heads * layer.attention.head_dim


def _scan_products(mixer: Any, length: int, slices: int) -> int:
    """Count the products of one row's scan, forward, backward and computed again; 0 for attention."""
    if not isinstance(mixer, Mamba2Spec | GatedDeltaNetSpec):
        return 0
    kernel = ssd if isinstance(mixer, Mamba2Spec) else delta_rule
    own = length // slices
    chunk = ssd.chunk_length(own, kernel.CHUNK)
    computed = -(-own // chunk) * chunk * slices  # the last chunk of a slice is filled up
    values = mixer.num_heads * mixer.head_dim
    if isinstance(mixer, Mamba2Spec):
        keys, P = mixer.num_groups * mixer.state_size, mixer.state_size
        products = computed * (4 * chunk * keys + (3 * chunk + 7 * P) * values)
    else:
        keys, P = mixer.num_keys * mixer.key_dim, mixer.key_dim
        wide = values + (mixer.num_heads * P if slices > 1 else 0)
        products = computed * (8 * chunk * keys + 11 * (chunk // 2 + P) * wide)
        products += 3 * slices * (slices - 2).bit_length() * wide * P * P if slices > 1 else 0
    return products + (3 * length * values * P if slices > 1 else 0)
