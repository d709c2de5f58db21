"""What a comparison found: one result per path, and the verdict. Data only."""

import dataclasses
from typing import Any

from fusejax.accuracy import Error
from fusejax.compile.targets import Target
from fusejax.hlo.analysis import Boundary, Kernel, Traffic, total_launches, total_traffic
from fusejax.predict import Cost
from fusejax.sheet import Sheet


@dataclasses.dataclass(frozen=True)
class Timing:
    """Measured times of one call, in µs. A GPU's kernels are timed by the card itself."""

    device_us: float | None
    """Median sum of the kernels' own times; None where only the host's clock was read."""
    low_us: float
    high_us: float
    """10th and 90th percentile of what `device_us`, or else `end_to_end_us`, is the median of."""
    end_to_end_us: float
    """Median time per call of many calls in a row, gaps between launches included."""
    kernel_us: tuple[float | None, ...] | None = None
    """Median per kernel in launch order, where the card's kernels match the compiled ones."""
    without_graphs_us: float | None = None
    """As `end_to_end_us`, with XLA kept from packing launches into CUDA graphs."""

    @property
    def gaps_us(self) -> float | None:
        """What launches cost beside the kernels, without CUDA graphs; None where not known."""
        if self.without_graphs_us is None or self.device_us is None:
            return None
        return self.without_graphs_us - self.device_us


@dataclasses.dataclass(frozen=True)
class PathResult:
    """One path: what was compiled, what it costs by model and by measurement."""

    name: str
    kernels: tuple[Kernel, ...]
    boundaries: tuple[Boundary, ...]
    programs: int
    """Programs dispatched one after another: 1, or the stages of the eager path."""
    cost: Cost | None
    """Predicted; None where nothing is known of the target's speed."""
    compile_cold_s: float
    compile_warm_s: float | None
    executable_bytes: int | None
    warnings: tuple[str, ...] = ()
    resources: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Registers, occupancy and so on, by kernel name."""
    error: Error | None = None
    timing: Timing | None = None
    counted: Traffic | None = None
    """Bytes that the card's counters saw."""
    attribution: str = ""
    """Why the kernels take longer or less than predicted; empty where they do not."""

    @property
    def launches(self) -> int:
        """Kernel launches per call."""
        return total_launches(self.kernels)

    @property
    def traffic(self) -> Traffic:
        """Modelled bytes per call."""
        return total_traffic(self.kernels)

    @property
    def predicted_us(self) -> float | None:
        """Predicted time of one call."""
        return None if self.cost is None else self.cost.total_us


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A path that cannot serve the input."""

    name: str
    reason: str
    error: Error | None = None
    """Of the kernel in simulation, where it was run so."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What changes from one path to another. Gains are positive where `to` is faster."""

    origin: str
    to: str
    removed_bytes: int
    removed_launches: int
    predicted_gain_us: float | None
    measured_gain_us: float | None
    explanation: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Who is fastest, and why."""

    fastest: str
    basis: str
    """"measured", "predicted", or "modelled bytes" where no time can be predicted."""
    summary: str
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Clocks:
    """What the driver says of a card under load."""

    sm_mhz: float
    max_sm_mhz: float
    power_w: float
    power_limit_w: float
    limited_by: tuple[str, ...]
    """What holds the clock back; empty where nothing does."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All paths of one op, or of one function, on one input and target."""

    op: str
    """Name of the op; of a function of the user's own "module:name"."""
    formula: str
    """Of a function: its arguments' and results' dtypes and shapes."""
    mode: str
    shape: tuple[int, ...]
    """Empty for functions, whose arguments differ; so is `dtype`."""
    dtype: str
    target: Target
    versions: dict[str, str]
    sheet: Sheet | None
    """None of functions that are not made of stages."""
    minimum_bytes: int
    floor_us: float | None
    """Measured time of a copy that moves the minimum bytes; None where no card was used."""
    paths: dict[str, PathResult | Refusal]
    verdict: Verdict | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    xla_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of XLA, by name, that every program was compiled with."""
    notes: tuple[str, ...] = ()
    """What is left out of a report, and why, a sentence each."""
    clocks: Clocks | None = None
    """Of the card under load, where calls take longer than their kernels and gaps explain."""

    def served(self) -> list[PathResult]:
        """The paths that could be compiled, in order."""
        return [path for path in self.paths.values() if isinstance(path, PathResult)]
