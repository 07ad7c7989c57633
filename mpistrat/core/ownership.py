"""Checks that other users cannot change a file or directory, before mpistrat trusts it or removes files in it."""

import os
import stat
from pathlib import Path


def foreign(found: os.stat_result, uid: int, others: int) -> str:
    """Return "" if `uid` owns a file and its mode has no bits of the mask `others`; else why it is not trusted."""
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}"
    if stat.S_IMODE(found.st_mode) & others:
        return f"gives access to other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def own_directory(path: Path, mode: int, others: int) -> None:
    """Make a directory with `mode` unless it exists, and check that no other user can put files into it.

    The check is needed because another user may have made the directory first, for example in /tmp.

    Raises OSError: The directory cannot be made, is not a directory, belongs to another user, or its mode has bits of
    the mask `others`, for example 0o022.
    """
    path.mkdir(mode=mode, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is a link, or not a directory")
    if problem := foreign(found, os.geteuid(), others):
        raise PermissionError(f"{path} {problem}")
