"""What elementwise HLO operations cost, each from two chains of it in one loop kernel.

    cost = (time of the long chain - time of the short one) / (steps more x elements)

The chains are so long that arithmetic, not memory, decides their time. Whatever folds a chain
(XLA, LLVM) would spoil this: second operands are data, and a step may need helper operations whose
cost is subtracted.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fusejax.measure import timing
from fusejax.measure.calibration import fit, programs
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.calibration.programs import Built, Probe
from fusejax.profile import OpCost

type _Function = Callable[[Any, Any, Any], Any]

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
_WIDTH = 1024
# Steps of the two chains, by how much arithmetic is in one. Arithmetic decides the time of the
# short ones too: theirs is at least twice that of moving their data (on an H200, by their PTX).
_LIGHTEST, _LIGHT, _MIDDLE, _HEAVY, _VERY_HEAVY = (64, 192), (32, 96), (24, 72), (8, 24), (4, 12)
# Where memory hides part of the short chain's arithmetic, the slope is too low.
_LEAST_RATIO = 1.8


@dataclasses.dataclass(frozen=True)
class Step:
    """One link of a chain: x becomes function(x, y, z), where 0.5 <= y < 1 <= z < 2."""

    ops: tuple[str, ...]
    """HLO operations that are measured, as `fusejax.hlo.analysis.Work.operations` names them."""
    helper: str | None
    """One more operation of each step, whose cost is measured by another chain."""
    dtype: str
    function: _Function
    lengths: tuple[int, int]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further compiler options."""

    @property
    def name(self) -> str:
        """For messages."""
        return " and ".join(self.ops)


def steps() -> tuple[Step, ...]:
    """All chains; those that measure helpers come first.

    `logistic` is missing: XLA for GPUs makes it of a negation, an exponential, an addition and a
    division. So is what XLA computes in f32 although the values are of 16 bits.
    """
    found = [
        _step(op, dtype, None, function, _LIGHTEST)
        for dtype in _DTYPES
        for op, function in (
            ("add", lambda x, y, z: x + y),
            ("subtract", lambda x, y, z: y - x),
            ("multiply", lambda x, y, z: x * y),
        )
    ]
    found += [
        _step(op, dtype, "add", function, _LIGHT)
        for dtype in _DTYPES
        for op, function in (
            ("maximum", lambda x, y, z: jnp.maximum(x + y, z)),
            ("minimum", lambda x, y, z: jnp.minimum(x + y, z)),
        )
    ]
    found += [_select(dtype) for dtype in _DTYPES]
    found += [
        _step("exponential", dtype, "subtract", lambda x, y, z: jnp.exp(x - z), _MIDDLE)
        for dtype in _DTYPES
    ]
    f32: tuple[tuple[str, str | None, _Function, tuple[int, int]], ...] = (
        ("negate", "add", lambda x, y, z: -(x + y), _LIGHTEST),
        ("abs", "subtract", lambda x, y, z: jnp.abs(x - y), _LIGHTEST),
        ("floor", "add", lambda x, y, z: jnp.floor(x + y), _MIDDLE),
        ("divide", "add", lambda x, y, z: y / (x + z), _MIDDLE),
        ("rsqrt", "add", lambda x, y, z: lax.rsqrt(x + z), _MIDDLE),
        ("sqrt", "add", lambda x, y, z: jnp.sqrt(x + z), _MIDDLE),
        ("cbrt", "add", lambda x, y, z: lax.cbrt(x + z), _HEAVY),
        ("log", "add", lambda x, y, z: jnp.log(x + z), _HEAVY),
        ("log-plus-one", "add", lambda x, y, z: jnp.log1p(x + z), _HEAVY),
        ("exponential-minus-one", "subtract", lambda x, y, z: jnp.expm1(x - z), _HEAVY),
        ("tanh", None, lambda x, y, z: jnp.tanh(x), _HEAVY),
        ("erf", None, lambda x, y, z: lax.erf(x), _HEAVY),
        ("power", "add", lambda x, y, z: lax.pow(x + z, y), _VERY_HEAVY),
        ("sine", None, lambda x, y, z: jnp.sin(x), _VERY_HEAVY),
        ("cosine", None, lambda x, y, z: jnp.cos(x), _VERY_HEAVY),
    )
    found += [_step(op, "f32", helper, function, lengths) for op, helper, function, lengths in f32]
    found += [
        _step("divide", "f16", "add", lambda x, y, z: y / (x + z), _MIDDLE),
        _step("tanh", "f16", None, lambda x, y, z: jnp.tanh(x), _HEAVY),
    ]
    return (*found, _convert("bf16"), _convert("f16"))


def probe(step: Step, length: int, elements: int) -> Probe:
    """The program of a chain: 16-bit values in and out, for f32 chains as well."""
    dtype = _DTYPES[step.dtype]
    stored = jnp.bfloat16 if step.dtype == "f32" else dtype

    def chain(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        x, y, z = x.astype(dtype), jnp.broadcast_to(y, x.shape), jnp.broadcast_to(z, x.shape)
        for _ in range(length):
            x = step.function(x, y, z)
        return x.astype(stored)

    row = jax.ShapeDtypeStruct((_WIDTH,), dtype)
    shape = (max(1, elements // _WIDTH), _WIDTH)
    options = {**timing.GRAPHS_OFF, **step.options}
    return Probe(chain, (jax.ShapeDtypeStruct(shape, stored), row, row), options)


def spoilt(step: Step, short: Built, long: Built, elements: int) -> str | None:
    """Why two chains do not measure a step, or None: every operation must have survived."""
    for built in (short, long):
        emitters = [kernel.emitter for kernel in built.kernels]
        if emitters != ["loop"]:
            return f"XLA made {', '.join(emitters)} of it, not one loop kernel"
    more = step.lengths[1] - step.lengths[0]
    expected = dict.fromkeys(step.ops, more)
    if step.helper is not None:
        expected[step.helper] = more
    if (found := _more_operations(short, long, elements)) != expected:
        return f"XLA made {found or 'nothing'} of {expected}"
    return None


def costs(
    plan: Plan, tell: Callable[[str], None], leave_out: Callable[[str], None]
) -> tuple[OpCost, ...]:
    """Times all chains in turn."""
    tell("compiling chains of arithmetic")
    known = {step.name: step for step in steps()}
    elements = max(1, plan.chain_elements // _WIDTH) * _WIDTH
    built = programs.build(
        {
            f"{name}, {length} times": probe(step, length, elements)
            for name, step in known.items()
            for length in step.lengths
        },
        leave_out,
    )
    chains: dict[tuple[str, str], Built] = {}
    for name, step in known.items():
        pair = [built.get(f"{name}, {length} times") for length in step.lengths]
        if pair[0] is None or pair[1] is None:
            continue
        if (reason := spoilt(step, pair[0], pair[1], elements)) is not None:
            leave_out(f"{name}: {reason}")
            continue
        chains |= {(name, "short"): pair[0], (name, "long"): pair[1]}
    tell("arithmetic")
    values = {dtype: _values(dtype, elements) for dtype in _DTYPES}
    timed = timing.device_times(
        {f"{name} {end}": one.run for (name, end), one in chains.items()},
        {f"{name} {end}": values[known[name].dtype] for name, end in chains},
        rounds=plan.rounds,
        iterations=5,
    )
    us = {
        name: (timed[f"{name} short"].median_us, timed[f"{name} long"].median_us)
        for name, end in chains
        if end == "short"
    }
    return from_times({name: known[name] for name in us}, us, elements, leave_out)


def from_times(
    known: Mapping[str, Step],
    us: Mapping[str, tuple[float, float]],
    elements: int,
    leave_out: Callable[[str], None],
) -> tuple[OpCost, ...]:
    """The costs of operations from the times of their short and long chains, helpers first."""
    ps: dict[str, float] = {}
    found: dict[tuple[str, str], OpCost] = {}
    for name, step in known.items():
        short, long = us[name]
        if long < _LEAST_RATIO * short:
            leave_out(
                f"{name}: {step.lengths[0]} steps take {short:.1f} µs and {step.lengths[1]} take "
                f"{long:.1f} µs, so that memory decides more than arithmetic"
            )
            continue
        if step.helper is not None and step.helper not in ps:
            leave_out(f"{name}: its helper {step.helper} was not measured")
            continue
        both = fit.per_step_ps((step.lengths[0], short), (step.lengths[1], long), elements)
        # An operation that rides on another (a negation) can come out below zero by noise.
        own = max(0.0, both - (ps[step.helper] if step.helper else 0.0)) / len(step.ops)
        for op in step.ops:
            ps[op] = own
            key = _opcode_and_dtype(op)
            # The compare of f32 stands for all: its result does not tell what is compared.
            found.setdefault(key, OpCost(*key, own, step.lengths[0], short, step.lengths[1], long))
    return tuple(found.values())


def _opcode_and_dtype(operation: str) -> tuple[str, str]:
    """ "tanh:f32" apart, and "convert:f32>bf16" as the convert of the 16-bit type."""
    opcode, dtypes = operation.split(":")
    return opcode, max(dtypes.split(">"), key=lambda dtype: dtype.endswith("16"))


def _step(
    op: str, dtype: str, helper: str | None, function: _Function, lengths: tuple[int, int]
) -> Step:
    helper = None if helper is None else f"{helper}:{dtype}"
    return Step((f"{op}:{dtype}",), helper, dtype, function, lengths)


def _select(dtype: str) -> Step:
    # Neither operand of the choice is one of the comparison, or it would be a minimum.
    def function(x: Any, y: Any, z: Any) -> Any:
        moved = x + y
        return jnp.where(moved < z, moved, y)

    ops = ("compare:pred", f"select:{dtype}")
    return Step(ops, f"add:{dtype}", dtype, function, _LIGHT)


def _convert(dtype: str) -> Step:
    def function(x: Any, y: Any, z: Any) -> Any:
        return lax.convert_element_type(
            lax.convert_element_type(x + y, _DTYPES[dtype]), jnp.float32
        )

    # Elsewhere XLA takes a conversion back and forth for none.
    exact = {"xla_allow_excess_precision": False}
    ops = (f"convert:f32>{dtype}", f"convert:{dtype}>f32")
    return Step(ops, "add:f32", "f32", function, _LIGHT, exact)


def _more_operations(short: Built, long: Built, elements: int) -> dict[str, float]:
    """Operations per element that the long chain has more than the short one."""
    before, after = (
        work.operations if (work := built.kernels[0].work) else {} for built in (short, long)
    )
    more = {op: (after[op] - before.get(op, 0)) / elements for op in after}
    return {op: number for op, number in more.items() if number}


def _values(dtype: str, elements: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    stored = jnp.bfloat16 if dtype == "f32" else _DTYPES[dtype]
    shapes = ((elements // _WIDTH, _WIDTH), (_WIDTH,), (_WIDTH,))
    drawn = [
        jax.random.uniform(key, shape, jnp.float32, low, high)
        for key, shape, (low, high) in zip(keys, shapes, ((0, 1), (0.5, 1), (1, 2)), strict=True)
    ]
    return (drawn[0].astype(stored), *(one.astype(_DTYPES[dtype]) for one in drawn[1:]))
