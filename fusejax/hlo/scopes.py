"""Named scopes out of the framework's operation names."""

import re
from collections.abc import Iterator

_WRAPPED = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)
# What JAX puts into a name for its own control flow; no user wrote it.
_STRUCTURE = frozenset((
    "checkpoint", "remat", "remat2", "rematted_computation", "closed_call", "core_call",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "pjit", "jit",
    "shard_map", "shmap_body", "xla_call", "eval_jaxpr", "while", "scan", "cond", "body",
    "body_jaxpr", "cond_jaxpr", "pallas_call", "named_call",
))  # fmt: skip
# Longer paths are looked for in parts of this length only: a hostile name must not cost its square.
_MOST_PARTS = 32
# jnp.einsum names a scope after its subscripts.
_EINSUM = re.compile(r"[A-Za-z.,]*->[A-Za-z.]*")
_BRANCH = re.compile(r"branch_\d+_fun")


def scope(op_name: str) -> str:
    """The user's scopes in an operation's name, outermost first: "block/mlp"; "" where none.

    `jit(f)/jvp(block)/jit(relu)/mlp/max` is in "block/mlp": transforms are unwrapped, the names of
    jitted functions and of control flow are dropped, and so is the primitive at the end.
    """
    parts: list[str] = []
    for part in _split(op_name)[:-1]:
        parts += _unwrapped(part)
    return "/".join(parts)


def operations(op_name: str) -> list[str]:
    """The operations that an instruction's name names: several where XLA merged equal ones."""
    return [name for name in op_name.split(";") if name]


def direction(op_name: str) -> str:
    """ "backward" for an operation that transposition made, else "forward"."""
    return (
        "backward" if any(part.startswith("transpose(") for part in _split(op_name)) else "forward"
    )


def holds(scope_path: str, wanted: str) -> bool:
    """Whether a scope path is the wanted one or lies inside it: "a/b/c" is in "b"."""
    return f"/{wanted.strip('/')}/" in f"/{scope_path}/"


def within(scope_path: str) -> Iterator[str]:
    """Yields every scope that `holds` finds in a path: of "a/b", "a", "a/b" and "b"."""
    parts = scope_path.strip("/").split("/")
    for start in range(len(parts)):
        for end in range(start + 1, min(len(parts), start + _MOST_PARTS) + 1):
            yield "/".join(parts[start:end])


def _split(name: str) -> list[str]:
    """Parts between slashes that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[\[\](){}/]", name):
        if match[0] in "[({":
            depth += 1
        elif match[0] in "])}":
            depth = max(depth - 1, 0)
        elif depth == 0:
            parts.append(name[start : match.start()])
            start = match.end()
    parts.append(name[start:])
    return parts


def _unwrapped(part: str) -> list[str]:
    for _ in range(len(part)):
        match = _WRAPPED.fullmatch(part)
        if match is None:
            break
        if match[1] in ("jit", "pjit", "shard_map"):  # the name of a function, not of a scope
            return []
        part = match[2]
    if len(inner_parts := _split(part)) > 1:
        return [name for inner in inner_parts for name in _unwrapped(inner)]
    is_structure = part in _STRUCTURE or _BRANCH.fullmatch(part) or _EINSUM.fullmatch(part)
    return [] if not part or is_structure else [part]
