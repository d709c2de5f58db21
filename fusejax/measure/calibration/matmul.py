"""How long cuBLAS takes for matrix products."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fusejax.measure import timing
from fusejax.measure.calibration import programs
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.calibration.programs import Probe
from fusejax.profile import MatmulTime

_DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
_OPTIONS = {**timing.GRAPHS_OFF, "xla_gpu_enable_triton_gemm": False}


def probe(m: int, n: int, k: int, dtype: str) -> Probe:
    """The program of a product [m, k] x [k, n], by cuBLAS."""
    left = jax.ShapeDtypeStruct((m, k), _DTYPES[dtype])
    right = jax.ShapeDtypeStruct((k, n), _DTYPES[dtype])
    return Probe(jnp.matmul, (left, right), _OPTIONS)


def times(
    plan: Plan, tell: Callable[[str], None], leave_out: Callable[[str], None]
) -> tuple[MatmulTime, ...]:
    """Times every size and dtype: the product's kernels together."""
    found = []
    for m, n, k in plan.matmuls:
        for dtype in _DTYPES:
            name = f"matmul {m} x {n} x {k} {dtype}"
            tell(name)
            one = probe(m, n, k, dtype)
            program = programs.build({name: one}, leave_out, at_once=False).get(name)
            if program is None:
                continue
            emitters = {kernel.emitter for kernel in program.kernels}
            if emitters != {"cublas"}:
                leave_out(f"{name}: XLA made {', '.join(sorted(emitters))} of it, not cuBLAS")
                continue
            values = programs.random_values(one.arguments)
            timed = timing.device_times(
                {name: program.run}, values, rounds=plan.rounds, iterations=5
            )[name]
            found.append(MatmulTime(m, n, k, dtype, timed.median_us, timed.low_us, timed.high_us))
    return tuple(found)
