"""Rows over eight CPU devices: what is compiled, and that values are those of one device.

A script, because the number of devices is fixed before JAX starts; `test_sharded` runs it.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk

WIDTH = 64
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, R, DY = (random(seed, 8, 16, WIDTH) for seed in range(3))
SCALE, BIAS = random(3, WIDTH), random(4, WIDTH)
LABELS = jnp.asarray(np.random.default_rng(5).integers(0, WIDTH, (8, 16)))


def fallback(name, **options):
    return functools.partial(getattr(pk, name), fallback=True, **options)


# Function and arguments, of which those with two axes or more are split.
OPERATIONS = {
    "layer_norm": (fallback("layer_norm"), (X, SCALE, BIAS)),
    "prenorm_rms_norm": (fallback("prenorm_rms_norm"), (X, R, SCALE)),
    "bias_gelu": (fallback("bias_gelu"), (X, BIAS)),
    "bias_gelu_rowsum": (fallback("bias_gelu_rowsum"), (X, BIAS)),
    "swiglu": (fallback("swiglu"), (X, R)),
    "softmax": (lambda x: fallback("softmax", where=x > -1)(x), (X,)),
    "softmax_cross_entropy": (fallback("softmax_cross_entropy"), (X, LABELS)),
}


def with_gradients(f):
    """Results and gradients; the cotangents are functions of the results, row by row."""

    def run(*given):
        floats = [i for i, a in enumerate(given) if jnp.issubdtype(a.dtype, jnp.floating)]

        def of_floats(*values):
            every = list(given)
            for i, value in zip(floats, values, strict=True):
                every[i] = value
            return f(*every)

        found, pull = jax.vjp(of_floats, *(given[i] for i in floats))
        return found, pull(jax.tree.map(jnp.sin, found))

    return run


def collectives(text):
    """(all-gathers of arrays with more than one axis, all-gathers, all-reduces) of compiled HLO."""
    found = re.findall(
        r"= (.*?) (all-[\w-]+?|reduce-scatter|collective-permute)(?:-start)?\(", text
    )
    others = {name for _, name in found} - {"all-gather", "all-reduce"}
    assert not others, others
    gathers = [shape for shape, name in found if name == "all-gather"]
    return (
        sum("," in shape.split("]")[0] for shape in gathers),
        len(gathers),
        sum(name == "all-reduce" for _, name in found),
    )


def alone(f, given):
    """Of one device."""
    return jax.jit(f)(*given)


def check(f, given, want, *, mesh, context=True, **expected):
    """Compiles, counts collectives, runs and compares."""

    def compiled():
        program = jax.jit(f).lower(*given).compile()
        return program, program(*given)

    if context:
        with jax.set_mesh(mesh):
            program, got = compiled()
    else:
        program, got = compiled()
    large, gathers, reductions = collectives(program.as_text())
    assert large == 0, "arrays of rows are gathered"
    counts = {"gathers": gathers, "reductions": reductions}
    assert all(counts[name] in allowed for name, allowed in expected.items()), counts
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    return got


def placed(given, mesh, spec, parameters=()):
    def place(array):
        axes = P(*tuple(spec)[: array.ndim]) if array.ndim > 1 else P(*parameters)
        return jax.device_put(array, NamedSharding(mesh, axes))

    return [place(array) for array in given]


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def rows_over_devices():
    for number, (name, (f, given)) in enumerate(OPERATIONS.items()):
        mesh = mesh_of((AUTO, EXPLICIT)[number % 2])
        # batch and sequence; or the batch over all devices
        spec = (P("data", "model"), P(("data", "model")))[number // 2 % 2]
        run = with_gradients(f)
        sums = any(array.ndim == 1 for array in given)
        found, gradients = check(
            run,
            placed(given, mesh, spec),
            alone(run, given),
            mesh=mesh,
            gathers=(0,),
            reductions=(int(sums),),
        )
        for array in (*jax.tree.leaves(found), gradients[0]):
            assert tuple(array.sharding.spec)[:1] == tuple(spec)[:1], (name, array.sharding)


def columns_over_devices():
    """Only numbers of rows are summed over devices, and gradients of parameters gathered."""
    for number, name in enumerate(
        ["layer_norm", "bias_gelu_rowsum", "softmax", "softmax_cross_entropy"]
    ):
        f, given = OPERATIONS[name]
        mesh = mesh_of((AUTO, EXPLICIT)[number % 2])
        run = with_gradients(f)
        split = placed(given, mesh, P("data", None, "model"))
        check(run, split, alone(run, given), mesh=mesh)


def inside_shard_map():
    f, given = OPERATIONS["layer_norm"]
    run = with_gradients(f)
    want = alone(run, given)
    mesh = mesh_of(AUTO)
    split = placed(given, mesh, P("data", "model"))
    for checked in (True, False):

        def body(*given, checked=checked):
            found, (dx, *sums) = run(*given)
            return found, (dx, *(sums if checked else jax.lax.psum(sums, ("data", "model"))))

        rows = P("data", "model")
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(rows, P(), P()),
            out_specs=(rows, (rows, P(), P())),
            check_vma=checked,
        )
        check(mapped, split, want, mesh=mesh, gathers=(0,), reductions=(1,))
    # Over one axis only: the compiler splits the rest, here of a formula.
    partly = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=(P("data"), (P("data"), P(), P())),
        axis_names={"data"},
    )
    check(partly, split, want, mesh=mesh, gathers=(0,))


def under_vmap():
    """Examples over devices, with parameters of their own and with the same."""
    f, (x, scale, bias) = OPERATIONS["layer_norm"]
    scales = jnp.stack([scale * (i + 1) for i in range(len(x))])
    run = jax.vmap(with_gradients(f), in_axes=(0, 0, None))
    for kind in (AUTO, EXPLICIT):
        mesh = mesh_of(kind)
        split = placed((x, scales, bias), mesh, P("data", "model"))
        split[1] = jax.device_put(scales, NamedSharding(mesh, P("data")))
        want = alone(run, (x, scales, bias))
        check(run, split, want, mesh=mesh, gathers=(0,), reductions=(1,))
    total = with_gradients(jax.vmap(f, in_axes=(0, None, None)))
    split = placed((x, scale, bias), mesh, P("data"))
    check(total, split, alone(total, (x, scale, bias)), mesh=mesh, gathers=(0,), reductions=(1,))


def what_the_compiler_is_told():
    """Splits that it derives, that do not come out even, of parameters, of nothing; eager calls."""
    f, given = OPERATIONS["layer_norm"]
    run = with_gradients(f)
    want = alone(run, given)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AUTO,) * 3)
    for spec in (P(("c", "a")), P("b", "a")):

        def constrained(x, *parameters, spec=spec):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
            return run(x, *parameters)

        numpy = [np.asarray(array) for array in given]
        check(constrained, numpy, want, mesh=mesh, gathers=(0,), reductions=(1,))
    check(run, [np.asarray(array) for array in given], want, mesh=mesh, reductions=(0,))
    mesh = mesh_of(AUTO)
    split = placed(given, mesh, P("data"), parameters=("data",))
    check(run, split, want, mesh=mesh, context=False)
    found, gradients = run(*placed(given, mesh, P("data")))
    assert found.sharding.spec[0] == gradients[0].sharding.spec[0] == "data"
    odd = (X[:6], SCALE, BIAS)

    def uneven(x, *parameters):
        split = jax.lax.with_sharding_constraint(x + 0, NamedSharding(mesh, P("data")))
        return run(split, *parameters)

    want = alone(run, odd)
    got = jax.jit(uneven)(*placed(odd, mesh, P()))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def axes_of_both_types():
    f, given = OPERATIONS["prenorm_rms_norm"]
    run = with_gradients(f)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(EXPLICIT, AUTO))
    check(run, placed(given, mesh, P("data", "model")), alone(run, given), mesh=mesh, gathers=(0,))
    explicit = mesh_of(EXPLICIT)
    with jax.set_mesh(explicit):
        x, _, scale = placed(given, explicit, P("data"))
        other = jax.device_put(R, NamedSharding(explicit, P("model")))
        with pytest.raises(ValueError, match="are split over 'data' and over 'model'"):
            f(x, other, scale)
        whole = jax.device_put(R, NamedSharding(explicit, P()))
        found, gradients = jax.jit(run)(x, whole, scale)
    assert gradients[1].sharding.is_fully_replicated
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-5),
        found,
        alone(f, given),
    )


def layers_in_a_scan():
    f, (x, scale, bias) = OPERATIONS["layer_norm"]

    def network(x, scales, biases):
        def layer(h, parameters):
            return h + jax.checkpoint(f)(h, *parameters), None

        return jax.lax.scan(layer, x, (scales, biases))[0]

    run = with_gradients(network)
    given = (x, jnp.stack([scale] * 3), jnp.stack([bias] * 3))
    mesh = mesh_of(AUTO)
    split = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(given, (P("data", "model"), P(), P()), strict=True)
    ]
    check(run, split, alone(run, given), mesh=mesh, gathers=(0,), reductions=(1,))


if __name__ == "__main__":
    warnings.simplefilter("error")
    rows_over_devices()
    columns_over_devices()
    inside_shard_map()
    under_vmap()
    what_the_compiler_is_told()
    axes_of_both_types()
    layers_in_a_scan()
    print("done")
