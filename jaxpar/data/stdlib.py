"""The text of Python's own standard library: real input that is on every machine, with no download.

Which files there are depends on the version of Python; for one version, the split is the same
everywhere.
"""

from __future__ import annotations

import pathlib
import sysconfig

from jaxpar.data.errors import DataError
from jaxpar.data.files import File, describe

# Installed packages are not the standard library; its tests are over half of its bytes, and some
# of them are not text on purpose.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def stdlib_files(root: str | pathlib.Path | None = None) -> list[File]:
    """Every ``.py`` of the standard library outside its tests, but the empty ones.

    Args:
        root: folder to read instead of this Python's.

    Raises:
        DataError: this Python came without the source of its library.
    """
    folder = pathlib.Path(root or sysconfig.get_path("stdlib"))
    paths = [
        str(path)
        for path in sorted(folder.rglob("*.py"))
        if not _LEFT_OUT & set(path.relative_to(folder).parts) and path.stat().st_size
    ]
    if not paths:
        raise DataError(
            f"no .py file under {folder}, where this Python keeps its library; "
            "give text files instead"
        )
    return describe(paths, root=str(folder))
