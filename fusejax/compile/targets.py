"""What a program is compiled for: a card that is not there, this machine's GPU, or the CPU."""

import dataclasses
import pathlib
import re

from fusejax.compile import platform
from fusejax.compile.cards import CARDS, describe
from fusejax.compile.dump import compile_with_dump
from fusejax.errors import UsageError

NAMES = ("auto", "cpu", "device", *CARDS)

# Without these XLA divides by zero or ends the process; the bounds are wide.
_SANE = {
    "memory_bandwidth": (10**9, 10**15),
    "core_count": (1, 10**5),
    "fpus_per_core": (1, 10**5),
    "threads_per_block_limit": (32, 1 << 16),
    "threads_per_warp": (32, 32),
    "threads_per_core_limit": (32, 1 << 16),
    "shared_memory_per_block": (1 << 10, 1 << 30),
    "shared_memory_per_core": (1 << 10, 1 << 30),
    "block_dim_limit_x": (1, 1 << 40),
    "block_dim_limit_y": (1, 1 << 40),
    "block_dim_limit_z": (1, 1 << 40),
    "registers_per_core_limit": (1 << 10, 1 << 30),
    "registers_per_block_limit": (1 << 10, 1 << 30),
    "l2_cache_size": (1, 1 << 50),
    "device_memory_size": (1 << 28, 1 << 60),
    "major": (7, 12),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for. `fusejax.rates` has what predictions are made from."""

    name: str
    """h200, cpu, ..., or the path of a description file."""
    kind: str
    """"device" (a GPU of this machine), "deviceless" or "cpu"."""
    title: str
    """The card's own name."""
    bandwidth_bytes_per_s: int | None
    """Memory bandwidth by the description, which XLA's cost model uses; None for the CPU."""
    description: str | None = dataclasses.field(default=None, repr=False)
    """Text form of XLA's GpuTargetConfigProto; None for the CPU."""

    def figure(self, field: str) -> int | None:
        """An integer field of the description, such as "core_count"; None where it has none."""
        return None if self.description is None else _integer(self.description, field)


def resolve(name: str) -> tuple[Target, str | None]:
    """The target of that name, and a line for the user where "auto" chose less than there could be.

    Raises:
      UsageError: unknown name, unreadable file, no GPU, or a missing extra.
    """
    if name == "auto":
        return _auto()
    if name == "cpu":
        return cpu(), None
    if name == "device":
        return device(), None
    if not name:
        raise UsageError(f"--target is empty: give one of {', '.join(NAMES)}")
    if name in CARDS:
        platform.require_compiler(name)
        return deviceless(name), None
    if pathlib.Path(name).exists() or "/" in name or name.endswith((".txtpb", ".pbtxt", ".txt")):
        target = from_file(pathlib.Path(name))
        platform.require_compiler(name)
        return target, None
    raise UsageError(
        f"--target {name!r} is unknown: give one of {', '.join(NAMES)}, or the file of a GPU "
        "target description"
    )


def _auto() -> tuple[Target, str | None]:
    if platform.gpu_present() and platform.cuda_backend_works():
        return device(), None
    missing = platform.missing_compiler()
    if missing is None:
        return deviceless("h200"), None
    return cpu(), (
        f"Compiling for the CPU: {missing}. With it every path is compiled for an H200 as well, "
        "with its kernels, bytes, boundaries and XLA's reasons."
    )


def cpu() -> Target:
    """The CPU of this machine."""
    return Target("cpu", "cpu", "CPU of this machine", None)


def deviceless(name: str) -> Target:
    """A card that need not be there, from our pinned figures. `name` is a key of CARDS."""
    card = CARDS[name]
    return Target(name, "deviceless", card.name, card.memory_bandwidth, describe(card))


def from_file(path: pathlib.Path) -> Target:
    """A card described by a file: the text form of XLA's GpuTargetConfigProto.

    Raises:
      UsageError: the file cannot be read or is not such a description.
    """
    try:
        description = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(
            f"--target {str(path)!r} cannot be read ({why}): give a readable text file that holds "
            "a GPU target description"
        ) from error
    bandwidth = _integer(description, "memory_bandwidth")
    if "gpu_device_info" not in description or not bandwidth:
        raise UsageError(
            f"--target {str(path)!r} is not a GPU target description: expected text with "
            "'gpu_device_info {' and 'memory_bandwidth: BYTES_PER_S' in it (a *.gpu_target_config"
            ".pbtxt of an XLA dump is one)"
        )
    for field, (least, most) in _SANE.items():
        value = _integer(description, field)
        if value is None or not least <= value <= most:
            raise UsageError(
                f"--target {str(path)!r}: {field} is {value}, and XLA needs one from {least} to "
                f"{most}: mend the description"
            )
    title = _title(description) or path.stem
    return Target(str(path), "deviceless", title, bandwidth, description)


def from_description(description: str) -> Target | None:
    """The NVIDIA card that a dump's description describes; None where it describes none."""
    bandwidth, title = _integer(description, "memory_bandwidth"), _title(description)
    if not bandwidth or not title or "cuda_compute_capability" not in description:
        return None
    return Target(title, "deviceless", title, bandwidth, description)


def device() -> Target:
    """The first GPU of this machine.

    Raises:
      UsageError: there is none, or JAX cannot use it.
    """
    if not platform.gpu_present():
        raise UsageError(
            "--target 'device': this machine has no NVIDIA GPU; give --target h200 (or a100, h100, "
            "b200) to compile without one, or --target cpu"
        )
    if not platform.cuda_backend_works():
        raise UsageError(
            "--target 'device': JAX does not see this machine's GPU; install the extra with "
            "pip install 'fusejax[cuda]' and leave JAX_PLATFORMS unset"
        )
    import jax

    card = jax.devices("cuda")[0]
    with jax.default_device(card):
        probe = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), "float32"))
        _, program = compile_with_dump(probe)
    description = program.target_config or ""
    return Target(
        "device", "device", card.device_kind, _integer(description, "memory_bandwidth"), description
    )


def usable_device() -> Target:
    """The first GPU of this machine, for a script that works on nothing else.

    Raises:
      UsageError: there is none, or JAX cannot use it; without a word of --target.
    """
    if not (platform.gpu_present() and platform.cuda_backend_works()):
        raise UsageError(
            "needs a GPU that JAX can use: run it where there is one, with JAX's CUDA plugin "
            "(pip install 'fusejax[cuda]') and JAX_PLATFORMS unset"
        )
    return device()


def _title(description: str) -> str | None:
    found = re.search(r'device_description_str: "([^"]+)"', description)
    return found[1] if found else None


def _integer(description: str, field: str) -> int | None:
    found = re.search(rf"(?<!\w){field}:\s*(-?\d+)(?![\w.])", description)
    return int(found[1]) if found else None
