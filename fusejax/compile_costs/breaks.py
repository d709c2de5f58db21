"""What ends a compiled region: JAX's counterparts of a "graph break".

An op is cut in two behind one of its stages, and something is put into the cut:

    nothing                one program
    two jits               two programs; what the first makes lies in memory
    Python that looks      two programs, and the host waits for a number before it starts the
                           second; inside jit it is an error
    jax.lax.cond           one program, which looks for itself
    callbacks              one program whose device waits for the host: what the host is given and
                           gives back crosses the bus

Callbacks cannot be lowered without a device: JAX asks the device's client for them. The same custom
call without a Python function behind it can be, and its kernels, bytes and copies are shown in
place; it could not run.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.errors import first_line
from fusejax.hlo import text as hlo_text
from fusejax.hlo.analyse import analyse_module
from fusejax.hlo.analysis import Traffic
from fusejax.hlo.module import Computation, Module
from fusejax.ops.op import Chain, Op, Stage, apply, nbytes

_GPU_CALLBACK = "xla_ffi_python_gpu_callback"
_CALLBACK = re.compile(r"python_(?:cpu|gpu)_callback")
_NUMBER = "number"  # what Python looks at
_NO_TRAFFIC = Traffic(0, 0)


@dataclasses.dataclass(frozen=True)
class Construct:
    """Something in the cut."""

    name: str
    chain: Chain
    """Stages are programs of their own."""
    stand_in: Chain | None = None
    """The same for a GPU that is not there, where `chain` cannot be lowered for one."""
    fetched: tuple[str, ...] = ()
    """Values that the host fetches between programs."""


@dataclasses.dataclass(frozen=True)
class Break:
    """What a construct compiles to."""

    construct: str
    refusal: str | None
    """Why it cannot be lowered for the target; None where it can."""
    is_stand_in: bool
    """Whether the figures are those of a custom call that takes the callback's place."""
    programs: int = 0
    launches: int = 0
    """On the device, callbacks not counted."""
    callbacks: int = 0
    conditionals: int = 0
    """Branches that are taken as the program runs; XLA turns small ones into selects of both."""
    traffic: Traffic = _NO_TRAFFIC
    """In device memory, what callbacks read and write included."""
    boundary_bytes: int = 0
    """Written and read again, between kernels and between programs."""
    host_bytes: int = 0
    """From the device to the host and back, by callbacks and by Python between programs."""
    host_waits: int = 0
    """Times that device and host wait for each other within one run: callbacks and fetches."""


def constructs(op: Op) -> tuple[Construct, ...]:
    """All of them for an op, cut behind the first stage that its split path cuts behind."""
    cut = _cut(op)

    def between(name: str, real: _InCut, stand_in: _InCut | None) -> Construct:
        return Construct(name, cut.whole(real), cut.whole(stand_in) if stand_in else None)

    return (
        Construct("one jit", cut.whole(lambda values: values)),
        Construct("two jits", cut.halves()),
        Construct("if float(sum) between jits", cut.looked_at(), fetched=(_NUMBER,)),
        Construct("if float(sum) inside jit", cut.chosen(_by_python)),
        Construct("jax.lax.cond", cut.chosen(jax.lax.cond)),
        between("jax.pure_callback", _pure_callback, _stand_in(has_side_effect=False)),
        between("io_callback", _io_callback, _stand_in(has_side_effect=True)),
        between("jax.debug.callback", _debug_callback, _stand_in_of_sum),
        between("jax.debug.print", _debug_print, _stand_in_of_sum),
    )


def breaks(
    op: Op,
    shape: Sequence[int],
    dtype: Any,
    target: Target,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Break, ...]:
    """Compiles every construct for the target."""
    shapes = op.argument_shapes(shape, dtype)
    found = []
    for construct in constructs(op):
        progress(f"in the middle: {construct.name}")
        found.append(_break(construct, shapes, target))
    return tuple(found)


def _break(construct: Construct, shapes: Sequence[Any], target: Target) -> Break:
    try:
        return _compiled(construct, construct.chain, shapes, target)
    except Exception as error:
        refusal = f"{type(error).__name__}: {first_line(error)}"
    if construct.stand_in is None or target.kind != "deviceless":
        return Break(construct.name, refusal, is_stand_in=False)
    found = _compiled(construct, construct.stand_in, shapes, target)
    return dataclasses.replace(found, refusal=refusal, is_stand_in=True)


def _compiled(construct: Construct, chain: Chain, shapes: Sequence[Any], target: Target) -> Break:
    values = chain.shapes(shapes)
    modules, analyses = [], []
    for stage in chain.stages:
        arguments = tuple(values[name] for name in stage.inputs)
        program = aot.compile_program(stage.function, arguments, target).program
        modules.append(hlo_text.read_module(program.hlo))
        analyses.append(analyse_module(modules[-1], program))
    called = [size for module in modules for size in callbacks(module)]
    return Break(
        construct=construct.name,
        refusal=None,
        is_stand_in=False,
        programs=len(chain.stages),
        launches=sum(analysis.launches for analysis in analyses) - len(called),
        callbacks=len(called),
        conditionals=sum(_count(module, "conditional") for module in modules),
        traffic=sum((analysis.traffic for analysis in analyses), _NO_TRAFFIC),
        boundary_bytes=_handed_over(chain, construct.fetched, values)
        + sum(b.written_bytes + b.read_bytes for a in analyses for b in a.boundaries),
        host_bytes=sum(called) + sum(nbytes(values[name]) for name in construct.fetched),
        host_waits=len(called) + len(construct.fetched),
    )


def callbacks(module: Module) -> tuple[int, ...]:
    """For each call of a Python callback: bytes that it is given plus bytes that it gives back."""
    return tuple(
        instruction.shape.bytes
        + sum(_operand_bytes(computation, o.name, o.element) for o in instruction.operands)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "custom-call"
        and _CALLBACK.search(instruction.attributes.get("custom_call_target", ""))
    )


def _operand_bytes(computation: Computation, name: str, element: tuple[int, ...]) -> int:
    shape = computation.by_name[name].shape
    for index in element:
        shape = shape.elements[index]
    return shape.bytes


def _count(module: Module, opcode: str) -> int:
    return sum(
        instruction.opcode == opcode
        for computation in module.computations.values()
        for instruction in computation.instructions
    )


def _handed_over(chain: Chain, fetched: Sequence[str], values: Mapping[str, Any]) -> int:
    """Bytes of what one program writes for another: the write too, unless it is a result."""
    total = 0
    for stage in chain.stages:
        for name in stage.outputs:
            readers = len(chain.readers(name))
            written = bool(readers) and name not in chain.results and name not in fetched
            total += nbytes(values[name]) * (readers + written)
    return total


type _InCut = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _Cut:
    """An op's chain in two parts."""

    op: Op
    first: tuple[Stage, ...]
    second: tuple[Stage, ...]

    @property
    def handed(self) -> tuple[str, ...]:
        """Values of the first part that the second reads."""
        read = {name for stage in self.second for name in stage.inputs}
        return tuple(name for stage in self.first for name in stage.outputs if name in read)

    @property
    def kept(self) -> tuple[str, ...]:
        """Results of the op that the first part makes."""
        made = {name for stage in self.first for name in stage.outputs}
        return tuple(name for name in self.op.chain.results if name in made)

    @property
    def made(self) -> tuple[str, ...]:
        """What the first part has to hand out."""
        return tuple(dict.fromkeys((*self.handed, *self.kept)))

    @property
    def last(self) -> tuple[str, ...]:
        """Results of the op that the second part makes."""
        return tuple(name for name in self.op.chain.results if name not in self.kept)

    @property
    def later(self) -> tuple[str, ...]:
        """What the second part takes: of the first part, then arguments of the op."""
        read = {name for stage in self.second for name in stage.inputs}
        arguments = tuple(name for name in self.op.chain.arguments if name in read)
        return (*self.handed, *arguments)

    def whole(self, in_cut: _InCut) -> Chain:
        """One program; `in_cut` is done to what is handed over."""

        def run(*arguments: Any) -> tuple[Any, ...]:
            values = dict(zip(self.op.chain.arguments, arguments, strict=True))
            values = _run(self.first, values)
            handed = tuple(values[name] for name in self.handed)
            values |= zip(self.handed, in_cut(handed), strict=True)
            values = _run(self.second, values)
            return tuple(values[name] for name in self.op.chain.results)

        return self._one_program(run)

    def chosen(self, choose: Callable[..., Any]) -> Chain:
        """One program; `choose(sum > 0, second part, zeros, *values)` is its second part."""

        def run(*arguments: Any) -> tuple[Any, ...]:
            values = dict(zip(self.op.chain.arguments, arguments, strict=True))
            values = _run(self.first, values)
            taken = tuple(values[name] for name in self.later)
            found = choose(_sum(taken) > 0, self._second, self._zeros, *taken)
            values |= zip(self.last, found, strict=True)
            return tuple(values[name] for name in self.op.chain.results)

        return self._one_program(run)

    def halves(self) -> Chain:
        """Two programs."""
        return self._two_programs(())

    def looked_at(self) -> Chain:
        """Two programs; the first hands out the number that decides about the second."""
        return self._two_programs((_NUMBER,))

    def _second(self, *taken: Any) -> tuple[Any, ...]:
        values = _run(self.second, dict(zip(self.later, taken, strict=True)))
        return tuple(values[name] for name in self.last)

    def _zeros(self, *taken: Any) -> tuple[Any, ...]:
        shapes = jax.eval_shape(self._second, *taken)
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

    def _one_program(self, run: Callable[..., Any]) -> Chain:
        chain = self.op.chain
        stage = Stage(self.op.name, run, chain.arguments, chain.results)
        return Chain(chain.arguments, (stage,), chain.results)

    def _two_programs(self, numbers: tuple[str, ...]) -> Chain:
        chain = self.op.chain

        def first(*arguments: Any) -> tuple[Any, ...]:
            values = _run(self.first, dict(zip(chain.arguments, arguments, strict=True)))
            made = tuple(values[name] for name in self.made)
            return (*made, _sum(made)) if numbers else made

        stages = (
            Stage("first", first, chain.arguments, (*self.made, *numbers)),
            Stage("second", self._second, self.later, self.last),
        )
        return Chain(chain.arguments, stages, chain.results)


def _cut(op: Op) -> _Cut:
    names = [stage.name for stage in op.chain.stages]
    behind = names.index(op.split_after[0]) + 1
    return _Cut(op, op.chain.stages[:behind], op.chain.stages[behind:])


def _run(stages: Sequence[Stage], values: dict[str, Any]) -> dict[str, Any]:
    for stage in stages:
        values = values | apply(stage, values)
    return values


def _sum(values: Sequence[Any]) -> Any:
    return values[0].astype(jnp.float32).sum()


def _by_python(condition: Any, chosen: Any, otherwise: Any, *values: Any) -> Any:
    return chosen(*values) if float(condition) else otherwise(*values)


def _alike(values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values)


def _same(*values: Any) -> tuple[Any, ...]:
    return values


def _pure_callback(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.pure_callback(_same, _alike(values), *values)


def _io_callback(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return io_callback(_same, _alike(values), *values)


def _debug_callback(values: tuple[Any, ...]) -> tuple[Any, ...]:
    jax.debug.callback(lambda _: None, _sum(values))
    return values


def _debug_print(values: tuple[Any, ...]) -> tuple[Any, ...]:
    jax.debug.print("sum {}", _sum(values))
    return values


def _stand_in(*, has_side_effect: bool) -> _InCut:
    """The custom call that JAX makes of a callback, with no function behind it."""

    def call(values: tuple[Any, ...]) -> tuple[Any, ...]:
        called = jax.ffi.ffi_call(_GPU_CALLBACK, _alike(values), has_side_effect=has_side_effect)
        return tuple(called(*values, index=np.uint64(0)))

    return call


def _stand_in_of_sum(values: tuple[Any, ...]) -> tuple[Any, ...]:
    jax.ffi.ffi_call(_GPU_CALLBACK, (), has_side_effect=True)(_sum(values), index=np.uint64(0))
    return values
