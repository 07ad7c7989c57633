"""Checks that only this user owns a file or directory, before its content is trusted, or files in it are removed."""

import os
import stat
from pathlib import Path


def foreign(found: os.stat_result, uid: int, others: int) -> str:
    """Return why a file is not trusted, or "": its owner is not `uid`, or its mode has permissions in `others`."""
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}"
    if stat.S_IMODE(found.st_mode) & others:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def own_directory(path: Path, mode: int, others: int) -> None:
    """Make a directory with `mode` unless it exists, and check that no other user can put files into it.

    Where everybody may make directories, as in /tmp, another user may have made it first.

    Raises OSError: The directory cannot be made, is not a directory, belongs to another user, or its mode has
    permissions in `others`.
    """
    path.mkdir(mode=mode, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is a link, or not a directory")
    if problem := foreign(found, os.geteuid(), others):
        raise PermissionError(f"{path} {problem}")
