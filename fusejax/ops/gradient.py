"""The backward pass of a chain: the gradient of its arguments, given them and the cotangents.

Nothing is saved by a forward pass before it: what the gradient needs of one is computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fusejax.ops.op import Chain, Stage


def cotangent(value: str) -> str:
    """Name of a value's cotangent."""
    return f"d_{value}"


def gradient_results(chain: Chain) -> tuple[str, ...]:
    """Names of the gradients of a chain: one for each argument that has one."""
    return tuple(cotangent(name) for name in chain.arguments if name not in chain.constants)


def gradient_program(
    program: Callable[..., tuple[Any, ...]], chain: Chain
) -> Callable[..., tuple[Any, ...]]:
    """The gradient as one function of the chain's arguments, then its results' cotangents."""
    count = len(chain.arguments)
    variable = [i for i, name in enumerate(chain.arguments) if name not in chain.constants]

    def run(*values: Any) -> tuple[Any, ...]:
        def of_variables(*variables: Any) -> tuple[Any, ...]:
            arguments = list(values[:count])
            for position, value in zip(variable, variables, strict=True):
                arguments[position] = value
            return program(*arguments)

        return jax.vjp(of_variables, *(values[i] for i in variable))[1](tuple(values[count:]))

    run.__name__ = f"{program.__name__}_gradient"
    return run


def gradient_chain(chain: Chain) -> Chain:
    """The gradient as a chain: the forward stages it needs, then each stage's own gradient."""
    wanted = {name for stage in chain.stages for name in stage.inputs}
    forward = tuple(stage for stage in chain.stages if wanted.intersection(stage.outputs))
    running = {result: cotangent(result) for result in chain.results}
    backward = []
    for stage in reversed(chain.stages):
        backward.append(_stage_gradient(stage, running, chain.constants))
    return Chain(
        arguments=(*chain.arguments, *(cotangent(result) for result in chain.results)),
        stages=(*forward, *backward),
        results=tuple(running[name] for name in chain.arguments if name not in chain.constants),
        constants=chain.constants,
    )


def _stage_gradient(stage: Stage, running: dict[str, str], constants: Sequence[str]) -> Stage:
    """One stage's gradient; adds to the cotangents that later stages have already contributed.

    `running` names, for each value, the cotangent so far, and is brought up to date.
    """
    variable = tuple(name for name in stage.inputs if name not in constants)
    known = tuple(name for name in variable if name in running)
    outputs = tuple(running[name] for name in stage.outputs)
    partial = tuple(running[name] for name in known)

    def gradient(*values: Any) -> tuple[Any, ...]:
        inputs = dict(zip(stage.inputs, values, strict=False))
        cotangents = values[len(inputs) : len(inputs) + len(outputs)]
        so_far = dict(zip(known, values[len(inputs) + len(outputs) :], strict=True))
        single = len(stage.outputs) == 1

        def of_variables(*variables: Any) -> Any:
            given = inputs | dict(zip(variable, variables, strict=True))
            return stage.function(*(given[name] for name in stage.inputs))

        contributions = jax.vjp(of_variables, *(inputs[name] for name in variable))[1](
            cotangents[0] if single else tuple(cotangents)
        )
        return tuple(
            contribution + so_far[name] if name in so_far else contribution
            for name, contribution in zip(variable, contributions, strict=True)
        )

    for name in variable:
        running[name] = f"{running[name]}+" if name in running else cotangent(name)
    return Stage(
        name=f"{stage.name}_grad",
        function=gradient,
        inputs=(*stage.inputs, *outputs, *partial),
        outputs=tuple(running[name] for name in variable),
    )
