"""What would compute a function for some arguments, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fusejax.functions import activations, card, norms, softmaxes
from fusejax.functions.call import explain
from fusejax.functions.choice import Asked, Choice
from fusejax.functions.function import Function

_FUNCTIONS: dict[str, tuple[Callable[..., Any], Function]] = {
    public.__name__: (public, function)
    for public, function in (
        (norms.layer_norm, norms.LAYER_NORM),
        (norms.rms_norm, norms.RMS_NORM),
        (norms.residual_layer_norm, norms.RESIDUAL_LAYER_NORM),
        (norms.residual_rms_norm, norms.RESIDUAL_RMS_NORM),
        (norms.prenorm_layer_norm, norms.PRENORM_LAYER_NORM),
        (norms.prenorm_rms_norm, norms.PRENORM_RMS_NORM),
        (activations.bias_gelu, activations.BIAS_GELU),
        (activations.bias_gelu_rowsum, activations.BIAS_GELU_ROWSUM),
        (activations.swiglu, activations.SWIGLU),
        (activations.geglu, activations.GEGLU),
        (softmaxes.softmax, softmaxes.SOFTMAX),
        (softmaxes.softmax_cross_entropy, softmaxes.SOFTMAX_CROSS_ENTROPY),
    )
}

_LOWERED_AS = {"gpu": card.CUDA, card.CUDA: card.CUDA, "rocm": "rocm", "cpu": "cpu", "tpu": "tpu"}


def explain_choice(
    function: Callable[..., Any] | str,
    *args: Any,
    implementation: Asked = None,
    platform: str | None = None,
    **options: Any,
) -> Choice:
    """What would compute a function of fusejax for these arguments, and why.

        print(fusejax.explain_choice("softmax", x, platform="cuda"))

    Without `implementation`, the function chooses the kernels ("pallas") where

    - it is lowered for CUDA, and the card has compute capability 9 to 11. The card is the target of
      `fusejax.inspect` or another compilation of fusejax, else this process's GPU, else an H200;
    - the kernels have the shapes and dtypes: float16, bfloat16 and float32 arrays that are alike,
      rows no longer than a cluster holds;
    - the last axis is not split over an explicit mesh axis (where rows are reduced);
    - XLA was not measured to be faster by more than 3 %, forward and backward together, on that
      card, for rows and arrays of about this size,

    and the plain formula ("xla") everywhere else.

    Args:
      function: `fusejax.layer_norm` or another of its functions, or the name of one.
      *args: the function's arguments; arrays or `jax.ShapeDtypeStruct`s.
      implementation: as the function's own.
      platform: what it is lowered for, "cuda" or "cpu" for example; by default what this process
        runs on.
      **options: the function's other arguments by name.

    Raises:
      ValueError: what the function would raise, or an unknown platform.
      TypeError: it has no such arguments.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", None)
    public, record = _FUNCTIONS.get(str(name), (None, None))
    if public is None or record is None or function not in (name, public):
        raise ValueError(f"{function!r} is none of {', '.join(_FUNCTIONS)}: give one of those.")
    if platform is not None and platform not in _LOWERED_AS:
        known = ", ".join(map(repr, _LOWERED_AS))
        raise ValueError(f"platform {platform!r} is unknown: give one of {known}.")
    bound = inspect.signature(public).bind(*args, implementation=implementation, **options)
    bound.apply_defaults()
    given = bound.arguments
    return explain(
        record,
        [given[name] for name in record.arrays],
        {name: given[name] for name in record.options},
        implementation,
        card.platform() if platform is None else _LOWERED_AS[platform],
    )
