"""Seccomp filter of the system calls that a model's program may not make; bubblewrap installs it.

Refused are calls that allocate memory outside any process's limit (System V segments, memory files) and calls that
create namespaces or mounts within the sandbox. See seccomp(2); call numbers are from the kernel's table per processor.
"""

import errno
import platform
import struct

from dvp.errors import DvpError

# Offsets in struct seccomp_data: call number, processor, low half of the first argument (both are little-endian).
NUMBER, PROCESSOR, FIRST_ARGUMENT = 0, 4, 16
NEW_USER = 0x10000000  # CLONE_NEWUSER, a flag of clone
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
X32 = 0x40000000  # the same calls under other numbers, on x86_64
CLONE3 = 435  # on both processors

PROCESSORS = {
    # The kernel's constant for it; clone; shmget, memfd_create, memfd_secret, mount, move_mount, fsopen, unshare, setns
    "x86_64": (0xC000003E, 56, (29, 319, 447, 165, 429, 430, 272, 308)),
    "aarch64": (0xC00000B7, 220, (194, 279, 447, 40, 429, 430, 97, 268)),
}


def program() -> bytes:
    """Return the filter as `bwrap --seccomp` reads it. Raises DvpError on a processor that is not in PROCESSORS."""
    machine = platform.machine()
    if machine not in PROCESSORS:
        raise DvpError(f"tools.kind: python: its sandbox runs on {' and '.join(PROCESSORS)}, and this is {machine}")
    processor, clone, refused = PROCESSORS[machine]
    # (code, lines to skip if so, lines to skip if not, value)
    lines = [
        (LOAD, 0, 0, PROCESSOR),
        *((EQUAL, 1, 0, processor), (RETURN, 0, 0, REFUSE)),
        (LOAD, 0, 0, NUMBER),
        *((AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)),
        *(line for number in refused for line in ((EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE))),
        # clone3's flags are in memory, which a filter cannot read; answered ENOSYS, the C library falls back to clone.
        *((EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, UNKNOWN)),
        *((EQUAL, 1, 0, clone), (RETURN, 0, 0, ALLOW)),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((ANY_BIT, 0, 1, NEW_USER), (RETURN, 0, 0, REFUSE)),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
