"""Which memory an array is in: a layout names any but the device's own as S(n)."""

import functools
import re

from fusejax.hlo.module import Shape

DEVICE = "device"
ON_CHIP = "on_chip"
HOST = "host"

_SPACE = re.compile(r"S\((\d{1,9})\)")
_HOST_SPACE = 5  # the same number on every back end


def memory(shape: Shape, back_end: str) -> str:
    """`DEVICE` (its main memory, HBM), `ON_CHIP` or `HOST`.

    A TPU's other spaces are on the chip: vector and scalar memory, and semaphores. A GPU's are
    parts of its main memory that are set apart, for collectives for example. A CPU has only one
    memory.
    """
    return _memory(shape.layout, back_end) if "S(" in shape.layout else DEVICE


@functools.lru_cache(maxsize=4096)
def _memory(layout: str, back_end: str) -> str:
    found = _SPACE.search(layout)
    space = int(found[1]) if found else 0
    if space == 0 or back_end == "cpu":
        return DEVICE
    if space == _HOST_SPACE:
        return HOST
    return ON_CHIP if back_end == "tpu" else DEVICE
