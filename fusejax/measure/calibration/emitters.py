"""What XLA's own kinds of kernel reach on data that no cache holds."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fusejax.measure import timing
from fusejax.measure.calibration import programs
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.calibration.programs import Built, Probe
from fusejax.profile import EmitterSpeed

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
_WIDTH = 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """A program that one emitter serves."""

    kind: str
    emitter: str
    dtype: str
    width: int
    probe: Probe

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kind} {self.dtype} {self.width}"


def cases(plan: Plan) -> Iterator[Case]:
    """Every emitter, in 16 and in 32 bits.

    Loop kernels have three: what they reach depends on how much of the traffic is writing.
    """
    for dtype, jax_dtype in _DTYPES.items():
        itemsize = jnp.dtype(jax_dtype).itemsize

        def shape(
            width: int, arrays: int, itemsize: int = itemsize, dtype: Any = jax_dtype
        ) -> jax.ShapeDtypeStruct:
            rows = max(1, plan.emitter_bytes // (arrays * width * itemsize))
            return jax.ShapeDtypeStruct((rows, width), dtype)

        one, two, three = (shape(_WIDTH, arrays) for arrays in (1, 2, 3))
        scalar = jax.ShapeDtypeStruct((), jax_dtype)
        yield Case("loop", "loop", dtype, _WIDTH, Probe(lambda x: x * 1.5 + 0.25, (two,)))
        fill = functools.partial(jnp.full, one.shape)
        yield Case("loop_write", "loop", dtype, _WIDTH, Probe(fill, (scalar,)))
        triad = Probe(lambda a, scalar, b: a * scalar + b, (three, scalar, three))
        yield Case("loop_two_inputs", "loop", dtype, _WIDTH, triad)
        rows, columns = (Probe(functools.partial(jnp.sum, axis=axis), (one,)) for axis in (1, 0))
        yield Case("reduction", "reduction", dtype, _WIDTH, rows)
        yield Case("reduction_columns", "reduction", dtype, _WIDTH, columns)
        yield Case("transpose", "transpose", dtype, _WIDTH, Probe(lambda x: x.T + 1, (two,)))
        for width in plan.widths:
            yield Case("triton", "triton", dtype, width, Probe(_normalise, (shape(width, 2),)))


def speeds(
    plan: Plan, tell: Callable[[str], None], leave_out: Callable[[str], None]
) -> tuple[EmitterSpeed, ...]:
    """Times the kernel that moves the data, of every case whose kernel is by the emitter it is for.

    A sum over the rows is two kernels, of which the second adds up some partial sums.
    """
    tell("compiling programs for every emitter")
    known = {case.name: case for case in cases(plan)}
    built = programs.build({name: case.probe for name, case in known.items()}, leave_out)
    found = []
    for name, program in built.items():
        case = known[name]
        emitter = program.kernels[program.main].emitter
        if emitter != case.emitter:
            leave_out(f"{name}: XLA's emitter is {emitter}")
            continue
        tell(f"emitters: {name}")
        found += _speed(case, program, plan, leave_out)
    return tuple(found)


def _speed(
    case: Case, program: Built, plan: Plan, leave_out: Callable[[str], None]
) -> list[EmitterSpeed]:
    values = programs.random_values(case.probe.arguments)
    timed = timing.device_times(
        {case.name: lambda: [program.run(*values) for _ in range(5)]},
        (),
        rounds=plan.rounds,
        iterations=2,
    )[case.name]
    try:
        point = programs.spread(program.bytes, programs.main_kernel_us(program, timed))
    except ValueError as error:
        leave_out(f"{case.name}: {error}")
        return []
    return [
        EmitterSpeed(case.kind, case.emitter, case.dtype, case.width, **dataclasses.asdict(point))
    ]


def _normalise(x: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return x / jnp.maximum(largest, -1)
