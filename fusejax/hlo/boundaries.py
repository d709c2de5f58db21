"""The tensors that one kernel writes and another reads."""

import dataclasses
from collections.abc import Mapping

from fusejax.hlo import reasons, spaces
from fusejax.hlo.analysis import Boundary
from fusejax.hlo.flow import Buffer, Flow, Launch, origins


@dataclasses.dataclass
class _Crossing:
    consumers: list[Launch]
    read_bytes: int = 0


def find(
    flow: Flow,
    names: Mapping[int, str],
    scopes: Mapping[int, tuple[str, ...]],
    sources: Mapping[int, str | None],
    evidence: reasons.Evidence,
) -> tuple[Boundary, ...]:
    """All boundaries, largest cost (bytes written + bytes read again, per run) first.

    Args:
      names: name of every launch's kernel; like `scopes` and `sources` under the launch's id().
    """
    crossings: dict[Buffer, _Crossing] = {}
    for launch in flow.launches:
        for buffer, size in launch.reads.items():
            for origin, share in origins(buffer).items():
                if origin.writer is None or not share or not origin.shape.bytes:
                    continue
                if origin.writer is launch and _updates(launch, buffer):
                    continue  # it goes on updating its own tensor in place
                crossing = crossings.setdefault(origin, _Crossing([]))
                crossing.consumers.append(launch)
                crossing.read_bytes += int(size * launch.count * share)
    outputs = {origin for buffer in flow.outputs for origin in origins(buffer)}
    found = [
        _boundary(flow, origin, crossing, origin in outputs, names, scopes, sources, evidence)
        for origin, crossing in crossings.items()
    ]
    return tuple(sorted(found, key=lambda b: -(b.written_bytes + b.read_bytes)))


def _updates(launch: Launch, buffer: Buffer) -> bool:
    return any(result.base is buffer for result in launch.results.values())


def _boundary(
    flow: Flow,
    origin: Buffer,
    crossing: _Crossing,
    is_output: bool,
    names: Mapping[int, str],
    scopes: Mapping[int, tuple[str, ...]],
    sources: Mapping[int, str | None],
    evidence: reasons.Evidence,
) -> Boundary:
    producer = origin.writer
    assert producer is not None
    consumers = list(dict.fromkeys(crossing.consumers))
    # An output has to be written once in any case; in a loop that is the last iteration's.
    writes = producer.count - 1 if is_output else producer.count
    memory = flow.memory(origin)
    whole = origin.shape.bytes if memory == spaces.DEVICE else 0
    written = producer.access.writes.get(origin.path, whole) * max(writes, 0)
    all_scopes = [scope for launch in (producer, *consumers) for scope in scopes[id(launch)]]
    return Boundary(
        producer=names[id(producer)],
        consumers=tuple(dict.fromkeys(names[id(consumer)] for consumer in consumers)),
        dtype=origin.shape.dtype,
        shape=origin.shape.dims,
        written_bytes=written,
        read_bytes=crossing.read_bytes,
        scopes=tuple(dict.fromkeys(all_scopes)),
        source=sources[id(producer)]
        or next((sources[id(c)] for c in consumers if sources[id(c)]), None),
        reason=reasons.reason(evidence, origin, consumers),
        memory=memory,
    )
