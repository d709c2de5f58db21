"""Row kernels for Hopper and later GPUs, in Pallas on Mosaic GPU; they need only JAX.

Each module has the kernel, its pure `plan`, the bytes it must move (`expected_bytes`) and the
reason for which it refuses arguments (`unsupported`).
"""

from pallas_kernels.gelu import bias_gelu, bias_gelu_rowsum
from pallas_kernels.layer_norm import residual_layer_norm
from pallas_kernels.plan import Plan
from pallas_kernels.row_softmax import softmax

__all__ = ["Plan", "bias_gelu", "bias_gelu_rowsum", "residual_layer_norm", "softmax"]
