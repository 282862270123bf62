"""A folder that a process and its children do not see, as on a machine with file systems of its own.

``python tests/support/hidden_folder.py FOLDER COMMAND ...`` runs a command that does not see the folder.
"""

import ctypes
import os
import sys

REFUSED = 125  # exit code: this user may not mount file systems
_NEW_MOUNTS, _RECURSIVE_PRIVATE = 0x00020000, 16384 | (1 << 18)  # CLONE_NEWNS; MS_REC | MS_PRIVATE


def hide(folder: str) -> None:
    """Put an empty file system in place of ``folder``, for this process and for those that it starts from now on.

    Raises PermissionError for a user who may not mount file systems.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        lambda: libc.unshare(_NEW_MOUNTS),
        lambda: libc.mount(b"none", b"/", None, _RECURSIVE_PRIVATE, None),
        lambda: libc.mount(b"none", folder.encode(), b"tmpfs", 0, None),
    )
    for call in calls:
        if call() != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)


if __name__ == "__main__":
    try:
        hide(sys.argv[1])
    except PermissionError:
        sys.exit(REFUSED)
    os.execvp(sys.argv[2], sys.argv[2:])
