"""The one exception that a user's mistake raises."""


class UsageError(ValueError):
    """What the user gave cannot be used.

    The message is one line: the thing, its value, the next step.
    """
