"""What is known of a compiled module: its kernels and the boundaries between them."""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel or a program moves through device memory."""

    read: int
    written: int
    is_bound: bool = False
    """True where the text gives only an upper bound (a gather, say)."""

    @property
    def total(self) -> int:
        """Bytes read plus bytes written."""
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read + other.read, self.written + other.written, self.is_bound or other.is_bound
        )

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.read * times, self.written * times, self.is_bound)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a launch computes."""

    operations: Mapping[str, int]
    """Element-wise operations by "opcode:dtype" of the result, such as "tanh:f32"; conversions by
    "convert:from>to". Adding up is an "add" for every element."""
    matmul_flops: int
    """Multiplications and additions of matrix products."""
    dtype: str = ""
    """Of the largest array that is read or written, HLO's name."""
    width: int = 1
    """Elements of a row of that array: its last dimension."""
    elements: int = 0
    """Of the largest array that is written."""
    matmul_dtype: str = ""
    """Of what goes into the matrix products, HLO's name."""
    sums_columns: bool = False
    """Whether it reduces along another dimension than the last."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One thing that is launched on the device."""

    name: str
    emitter: str
    """loop, reduction, transpose, scatter, triton, triton_gemm, cublas, cudnn, mosaic_gpu, copy,
    collective, sort, custom_call, ..."""
    scopes: tuple[str, ...]
    """Named scopes of the instructions inside, in program order, each once."""
    source: str | None
    """Innermost user source line, "file:line"."""
    count: int
    """Launches per run of the program: 1, or the product of the trip counts around it."""
    traffic: Traffic
    """Of one launch."""
    direction: str | None = None
    """forward, backward (its instructions come from transposition) or both; None where not told."""
    work: Work | None = dataclasses.field(default=None, hash=False)
    """Of one launch, as far as the text shows what is inside."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why XLA ends a kernel at a boundary."""

    kind: str
    """cost_model, rule, barrier, emitter_limit, dispatch or unknown."""
    text: str
    us_fused: float | None = None
    """XLA's estimate for the fused form, where the cost model decided."""
    us_unfused: float | None = None


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A tensor that one kernel writes and others read."""

    producer: str
    consumers: tuple[str, ...]
    dtype: str
    """HLO's name: "bf16", "f32", ..."""
    shape: tuple[int, ...]
    written_bytes: int
    """Cost of the write: 0 where the tensor is a program output too (it is written in any case)."""
    read_bytes: int
    """All consumers' reads together."""
    scopes: tuple[str, ...]
    """Scopes of the producer, then the consumers, each once."""
    source: str | None
    reason: Reason
    memory: str = "device"
    """Where the tensor is: "device", "on_chip" or "host". Only in the first are bytes counted."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """A named scope of the program and what became of it."""

    name: str
    kernels: tuple[str, ...]
    """Kernels that hold its instructions; empty where none survived (status "folded")."""


@dataclasses.dataclass(frozen=True)
class Analysis:
    """One module, analysed."""

    name: str
    backend: str
    """gpu, cpu, tpu or unoptimised."""
    kernels: tuple[Kernel, ...]
    """In launch order."""
    boundaries: tuple[Boundary, ...]
    """Largest cost (written + read bytes) first."""
    minimum_bytes: int
    """Entry parameters read once plus entry outputs written once."""
    scopes: tuple[Scope, ...]
    warnings: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        """Launches per run."""
        return total_launches(self.kernels)

    @property
    def traffic(self) -> Traffic:
        """Bytes per run."""
        return total_traffic(self.kernels)


def total_launches(kernels: Sequence[Kernel]) -> int:
    """Launches per run of all kernels."""
    return sum(kernel.count for kernel in kernels)


def total_traffic(kernels: Sequence[Kernel]) -> Traffic:
    """Bytes per run of all kernels."""
    return sum((kernel.traffic * kernel.count for kernel in kernels), Traffic(0, 0))
