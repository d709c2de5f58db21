"""Whether a function keeps its recorded budget, and what to tell where it does not."""

from fusejax.errors import UsageError
from fusejax.gates import budget, text
from fusejax.gates.budget import Budget


def failure(
    name: str, file: str, recorded: Budget | None, now: Budget, *, is_strict: bool
) -> str | None:
    """Why a check fails, the first line a summary of it; None where it passes.

    Args:
      name: of the check.
      file: the record file, as it is shown.
      is_strict: whether a budget that another version of JAX recorded is none.

    Raises:
      UsageError: there is no budget, or it is for something else.
    """
    if recorded is None:
        raise UsageError(
            f"no budget of {name!r} is recorded in {file}: run pytest with --fusion-update, review "
            f"the file and commit it (now: {text.summary(now)})"
        )
    for noun, then, here in (
        ("target", recorded.target, now.target),
        ("scope", recorded.scope, now.scope),
    ):
        if then != here:
            raise UsageError(
                f"the budget of {name!r} in {file} is for {noun} {then or 'of no name'}, the check "
                f"for {here or 'none'}: give it another name, or record it with --fusion-update"
            )
    found = budget.compare(recorded, now)
    versions = f"recorded with JAX {recorded.jax}, this is JAX {now.jax}"
    is_other = recorded.jax != now.jax
    if found.worse:
        first = f"{name!r} on {now.target} is worse than its budget in {file}: "
        return "\n".join(
            (
                first + "; ".join(map(str, found.worse)),
                *(f"  better: {quantity}" for quantity in found.better),
                *([f"  {versions}"] if is_other else []),
                *_grown(recorded, now),
                *text.difference(found),
                "  accept it with --fusion-update",
            )
        )
    if is_other and is_strict:
        change = "better" if found.better else "the same"
        return (
            f"{name!r} on {now.target}: its budget in {file} was {versions}, and fusion_strict is "
            f"on: it is {change} now; record it with --fusion-update"
        )
    return None


def _grown(recorded: Budget, now: Budget) -> list[str]:
    if recorded.minimum_bytes == now.minimum_bytes:
        return []
    return [
        f"  inputs and outputs, moved once each: {recorded.minimum_bytes:,} -> "
        f"{now.minimum_bytes:,} bytes"
    ]
