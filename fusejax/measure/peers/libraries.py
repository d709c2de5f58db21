"""What PyTorch's libraries have for every operation. PyTorch is imported where it is used only."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from fusejax.measure.peers.cells import BACKWARD
from fusejax.measure.peers.formulas import EPSILON

LIBRARIES = {  # module, and what it is installed as
    "torch.compile": ("torch", "torch"),
    "Liger": ("liger_kernel", "liger-kernel"),
    "quack": ("quack", "quack-kernels"),
}


def installed() -> dict[str, str]:
    """Version of each library that is here; none without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    found = {}
    for name, (module, package) in LIBRARIES.items():
        if importlib.util.find_spec(module) is not None:
            found[name] = versions(package).get(package, "of unknown version")
    return found


def versions(*packages: str) -> dict[str, str]:
    """Version of each package that is installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def formulas() -> dict[str, Callable[..., Any]]:
    """The plain PyTorch form of every operation; arguments as in `cells.Arguments`."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    def layer_norm(x, scale, bias):
        return F.layer_norm(x.float(), scale.shape, scale, bias, EPSILON).to(x.dtype)

    def rms_norm(x, scale):
        return F.rms_norm(x.float(), scale.shape, scale, EPSILON).to(x.dtype)

    def prenorm_rms_norm(x, residual, scale):
        h = x + residual
        return rms_norm(h, scale), h

    def bias_gelu(x, bias):
        return F.gelu(x.float() + bias, approximate="tanh").to(x.dtype)

    def bias_gelu_rowsum(x, bias):
        y = F.gelu(x.float() + bias, approximate="tanh")
        return y.to(x.dtype), y.sum(-1)

    def cross_entropy(logits, labels):
        return F.cross_entropy(logits.float(), labels, reduction="none")

    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "residual_layer_norm": lambda x, residual, *more: layer_norm(x + residual, *more),
        "prenorm_rms_norm": prenorm_rms_norm,
        "bias_gelu_rowsum": bias_gelu_rowsum,
        "softmax": lambda x: torch.softmax(x, -1),
        "cross_entropy": cross_entropy,
        "swiglu": lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype),
        "bias_gelu": bias_gelu,
    }


def function(name: str, op: str) -> Any:
    """A library's function for an operation, or for what it is the gradient of; None without one.

    Where a library has a gradient that autograd does not know of, it is the function's `gradients`.
    """
    import torch

    of = op.removesuffix("_backward")
    if name == "torch.compile":
        return torch.compile(formulas()[of], dynamic=False)
    if name == "Liger":
        return _liger(of, is_backward=op in BACKWARD)
    return _quack(of)


def _liger(op: str, *, is_backward: bool) -> Any:
    import liger_kernel.ops as liger

    # Not in place: the cotangent is needed again. Its cross entropy computes the gradient forward,
    # so that there is no backward to be timed.
    style = (EPSILON, 0.0, "llama", False)
    if op == "cross_entropy" and is_backward:
        return None
    return {
        "layer_norm": lambda *given: liger.LigerLayerNormFunction.apply(*given, EPSILON),
        "rms_norm": lambda *given: liger.LigerRMSNormFunction.apply(*given, *style),
        "prenorm_rms_norm": lambda *given: liger.LigerFusedAddRMSNormFunction.apply(*given, *style),
        "softmax": lambda x: liger.LigerSoftmaxFunction.apply(x),
        "cross_entropy": lambda logits, labels: liger.LigerCrossEntropyFunction.apply(
            logits, labels, None, -100, 0.0, 0.0, "none"
        ),
        "swiglu": lambda gate, up: liger.LigerSiLUMulFunction.apply(gate, up),
    }.get(op)


class _QuackLayerNorm:
    """Its gradient is a function of its own, without autograd."""

    def gradients(self, x: Any, scale: Any, bias: Any, dy: Any) -> Callable[[], Any]:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        _, reciprocal, mean = layernorm_fwd(
            x, scale, bias, eps=EPSILON, return_rstd=True, return_mean=True
        )
        return lambda: layernorm_bwd(x, scale, dy, reciprocal, mean, has_bias=True)


def _quack(op: str) -> Any:
    import quack

    return {
        "layer_norm": _QuackLayerNorm(),
        "rms_norm": lambda x, scale: quack.rmsnorm(x, scale, eps=EPSILON),
        "prenorm_rms_norm": lambda x, residual, scale: quack.rmsnorm(
            x, scale, residual=residual, eps=EPSILON, prenorm=True
        ),
        "softmax": lambda x: quack.softmax(x),
        "cross_entropy": lambda logits, labels: quack.cross_entropy(
            logits, labels, reduction="none"
        ),
    }.get(op)
