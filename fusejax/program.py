"""What one compile yields: the text that every later stage reads."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled XLA module and what the compiler wrote about it.

    Only `hlo` is always there. The rest lies in a dump folder or comes from a compile that asked
    for it; whoever reads it must do without where it is None or empty.
    """

    name: str
    """Name of the HLO module, such as "jit_f"."""
    hlo: str
    """Text of the optimised (final, scheduled) HLO module."""
    unoptimised: str | None = None
    """Text of the module before optimisation."""
    decisions: str | None = None
    """The priority-fusion pass's dump: text of a FusionProcessDumpProto."""
    decisions_file: str | None = None
    """Name of the file that `decisions` came from."""
    launch_order: str | None = None
    """The thunk sequence: what is launched, in order, with grid, threads and shared memory."""
    target_config: str | None = None
    """The card that it was compiled for: text of a GpuTargetConfigProto."""
    ptx: tuple[str, ...] = ()
    """PTX of every kernel that XLA generated itself."""
    backend: str | None = None
    """"gpu" or "cpu" where the compiler's file names tell; HLO itself does not."""
    deviceless: bool | None = None
    """Whether it was compiled for a card that is not there; None where that is not known."""
