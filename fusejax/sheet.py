"""The traffic sheet: what must move and what stages would add, before anything is compiled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fusejax.ops.op import Chain, hlo_dtype, nbytes


@dataclasses.dataclass(frozen=True)
class Handover:
    """A value that one stage stores and others load."""

    value: str
    dtype: str
    shape: tuple[int, ...]
    producer: str
    consumers: tuple[str, ...]
    stored_bytes: int
    """0 where the value is a result: it is stored in any case."""
    loaded_bytes: int


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Bytes of a chain whose every stage runs by itself, inputs and outputs apart. In bytes."""

    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    handovers: tuple[Handover, ...]
    reread_bytes: int
    """Loads of inputs beyond the first one."""
    launches: int

    @property
    def minimum_bytes(self) -> int:
        """Inputs loaded once, outputs stored once."""
        return sum(size for _, size in (*self.inputs, *self.outputs))

    @property
    def saved_bytes(self) -> int:
        """The most that fusing can save: every hand-over, every second load of an input."""
        return self.reread_bytes + sum(h.stored_bytes + h.loaded_bytes for h in self.handovers)

    @property
    def saved_launches(self) -> int:
        """The most launches that fusing can save."""
        return self.launches - 1


def traffic_sheet(chain: Chain, arguments: Sequence[Any]) -> Sheet:
    """The sheet of a chain, from the shapes and dtypes of its arguments."""
    values = chain.shapes(arguments)
    used = [name for name in chain.arguments if chain.readers(name)]
    handovers = [
        Handover(
            value=name,
            dtype=hlo_dtype(values[name].dtype),
            shape=tuple(values[name].shape),
            producer=stage.name,
            consumers=chain.readers(name),
            stored_bytes=0 if name in chain.results else nbytes(values[name]),
            loaded_bytes=nbytes(values[name]) * len(chain.readers(name)),
        )
        for stage in chain.stages
        for name in stage.outputs
        if chain.readers(name)
    ]
    return Sheet(
        inputs=tuple((name, nbytes(values[name])) for name in used),
        outputs=tuple((name, nbytes(values[name])) for name in chain.results),
        handovers=tuple(handovers),
        reread_bytes=sum(nbytes(values[n]) * (len(chain.readers(n)) - 1) for n in used),
        launches=len(chain.stages),
    )
