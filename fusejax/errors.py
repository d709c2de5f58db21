"""The one exception that a user's mistake raises, and one line of any other."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UsageError(ValueError):
    """What the user gave cannot be used.

    The message is one line: the thing, its value, the next step.
    """
