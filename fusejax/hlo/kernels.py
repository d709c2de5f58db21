"""What kind of kernel a launch is, and which back end a module was compiled for."""

import re

from fusejax.hlo.module import ASYNC_STARTS, Computation, Instruction, Module

_TARGETS = (
    (re.compile(r"mosaic_gpu"), "mosaic_gpu"),
    (re.compile(r"__cublas\$|^cublas"), "cublas"),
    (re.compile(r"__cudnn\$|^cudnn"), "cudnn"),
    (re.compile(r"__gpu\$xla\.gpu\.triton|^triton_kernel_call"), "triton"),
    (re.compile(r"__cub\$"), "sort"),
    (re.compile(r"tpu_custom_call"), "mosaic_tpu"),
)
_FUSION_KINDS = (
    (re.compile(r"__triton_(?:nested_|scaled_)?(?:gemm|dot)"), "triton_gemm"),
    (re.compile(r"__triton"), "triton"),
    (re.compile(r"__cudnn"), "cudnn"),
    (re.compile(r"__cublas"), "cublas"),
    (re.compile(r"__(xnn|ynn|onednn)_fusion"), "library"),
)
_KIND = re.compile(r'"?kind"?\s*:\s*"(__\w+\$?\w*)"')
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "send",
    "recv",
)
_OWN_KERNELS = frozenset((
    "sort", "fft", "convolution", "dot", "cholesky", "triangular-solve", "infeed", "outfeed",
))  # fmt: skip
_GPU = re.compile(
    r'__cublas|__cudnn|mosaic_gpu|__gpu\$|"operation_queue_id"|fusion_backend_config'
    r"|__triton|__cub\$"
)
_TPU = re.compile(r"scoped_memory_configs|window_config|tpu_custom_call|megacore")
_TILED = re.compile(r"[:)]T\(|^T\(")
_GPU_NAME = re.compile(r"(?:loop|input)_\w*fusion")
_CPU_NAME = re.compile(r"(?!fusion)[a-z]\w*_fusion")
_ELEMENTWISE_OR_REDUCE = frozenset(
    ("add", "subtract", "multiply", "divide", "maximum", "exponential", "tanh", "reduce", "convert")
)
_CPU = re.compile(
    r'outer_dimension_partitions|__(?:xnn|ynn|onednn)|__cpu\$|xla_cpu|"fusion_config"|EigenMatMul'
)


def backend(module: Module) -> str:
    """ "gpu", "cpu", "tpu", or "unoptimised" for a module in which nothing was fused yet.

    XLA does not write it down, so it is told from what only one back end writes.
    """
    fusions: list[Instruction] = []
    has_bare_operation = False
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if _TILED.search(instruction.shape.layout):
                return "tpu"
            for key in ("backend_config", "custom_call_target"):
                text = instruction.attributes.get(key)
                if text is None:
                    continue
                for pattern, name in ((_TPU, "tpu"), (_CPU, "cpu"), (_GPU, "gpu")):
                    if pattern.search(text):
                        return name
            if instruction.opcode == "fusion":
                fusions.append(instruction)
    if not fusions and not module.is_scheduled:
        return "unoptimised"
    for fusion in fusions:
        if fusion.attributes.get("kind") == "kInput" or _GPU_NAME.match(fusion.name):
            return "gpu"
    for instruction in module.entry.instructions:
        has_bare_operation |= instruction.opcode in _ELEMENTWISE_OR_REDUCE
    # XLA:GPU puts every operation into a fusion and names fusions after their emitter; XLA:CPU
    # leaves operations bare and names fusions after what is in them.
    is_cpu = has_bare_operation or any(_CPU_NAME.match(fusion.name) for fusion in fusions)
    return "cpu" if module.is_scheduled and is_cpu else "gpu"


def emitter(instruction: Instruction, module: Module) -> str:
    """The kind of kernel that a launch is: see `Kernel.emitter`."""
    opcode = instruction.opcode
    called = instruction.called
    if opcode == "async-start" and called:
        root = module.computations[called[0]].root
        return emitter(root, module) if root.opcode not in ASYNC_STARTS else "custom_call"
    opcode = opcode.removesuffix("-start")
    if opcode == "custom-call":
        return _by_target(instruction)
    if opcode == "fusion":
        body = module.computations[called[0]] if called else None
        return _by_fusion(instruction, body)
    if opcode in _COLLECTIVES:
        return "collective"
    if opcode in ("copy", "transpose", "scatter"):
        return opcode
    if opcode in ("reduce", "reduce-window"):
        return "reduction"
    return opcode if opcode in _OWN_KERNELS else "loop"


def _by_target(instruction: Instruction) -> str:
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return next((name for pattern, name in _TARGETS if pattern.search(target)), "custom_call")


def _by_fusion(instruction: Instruction, body: Computation | None) -> str:
    kind = _KIND.search(instruction.backend_config)
    if kind:
        for pattern, name in _FUSION_KINDS:
            if pattern.search(kind[1]):
                return name
    inside = {i.opcode for i in body.instructions} if body else set()
    if body and instruction.attributes.get("kind") == "kCustom":
        calls = [i for i in body.instructions if i.opcode == "custom-call"]
        return _by_target(calls[0]) if calls else "custom_fusion"
    if instruction.attributes.get("kind") == "kOutput":
        return next((op for op in ("convolution", "dot") if op in inside), "loop")
    if instruction.attributes.get("kind") == "kInput":
        # The hero of an input fusion, in the order in which XLA's emitters claim it.
        for opcode, name in (
            ("scatter", "scatter"),
            ("reduce", "reduction"),
            ("transpose", "transpose"),
            ("copy", "transpose"),
        ):
            if opcode in inside:
                return name
    return "loop"
