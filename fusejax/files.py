"""Files that are written whole, or not at all."""

import contextlib
import os
import pathlib
import tempfile


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file in UTF-8: aside, then renamed. A link is followed, a mode is kept.

    Raises:
      OSError: it cannot be written; what was there is as before, and nothing is left beside it.
    """
    real = pathlib.Path(os.path.realpath(path))
    mode = real.stat().st_mode & 0o777 if real.exists() else 0o666 & ~_umask()
    aside = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=real.parent, suffix=".partial", delete=False, encoding="utf-8", newline="\n"
        ) as file:
            aside = file.name
            file.write(text)
        os.chmod(aside, mode)
        os.replace(aside, real)
    except BaseException:  # ctrl-C leaves nothing behind either
        if aside is not None:
            with contextlib.suppress(OSError):
                os.unlink(aside)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
