"""Whether a file or directory is this user's alone, before its content is trusted, or files in it are removed."""

import os
import stat
from pathlib import Path


def foreign(found: os.stat_result, uid: int, others: int) -> str:
    """Why a file or directory is not trusted: it is not this user's, or others have one of these permissions. Or ""."""
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}"
    if stat.S_IMODE(found.st_mode) & others:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def own_directory(path: Path, mode: int, others: int) -> None:
    """Make a directory with this mode unless it is there, and check that no other user can put files into it.

    Another user may have made it first where everybody may, as in /tmp.

    Args:
        path: The directory. That above it is there.
        mode: Of a new one.
        others: Permissions that nobody else may have.

    Raises:
        OSError: It cannot be made, is no directory, or is not this user's alone.
    """
    path.mkdir(mode=mode, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is a link, or no directory")
    if problem := foreign(found, os.geteuid(), others):
        raise PermissionError(f"{path} {problem}")
