"""The system calls that a model's program may not make, as a filter of the kernel's (seccomp) that bubblewrap installs.

Refused is what would hold memory that no limit of a process counts (System V segments, files of memory), and what would
make namespaces and mounts within the sandbox. See seccomp(2); numbers are of the kernel's tables of each processor.
"""

import errno
import platform
import struct

from dvp.errors import DvpError

# Of struct seccomp_data: the call's number, the processor, the low half of the first argument (both are little-endian).
NUMBER, PROCESSOR, FIRST_ARGUMENT = 0, 4, 16
NEW_USER = 0x10000000  # of clone's flags
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
X32 = 0x40000000  # the same calls under other numbers, on x86_64

PROCESSORS = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "clone3": 435},
        # shmget, memfd_create, memfd_secret, mount, move_mount, fsopen, unshare, setns
        (29, 319, 447, 165, 429, 430, 272, 308),
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "clone3": 435},
        (194, 279, 447, 40, 429, 430, 97, 268),
    ),
}


def program() -> bytes:
    """The filter, as `bwrap --seccomp` reads it. Raises DvpError on a processor whose numbers are not known here."""
    machine = platform.machine()
    if machine not in PROCESSORS:
        raise DvpError(f"tools.kind: python: its sandbox runs on {' and '.join(PROCESSORS)}, and this is {machine}")
    processor, clone, refused = PROCESSORS[machine]
    # (code, value, where to go if so, where to go if not); a place is a name, None the next line.
    lines: list[tuple[int, int, str | None, str | None]] = [
        (LOAD, PROCESSOR, None, None),
        (EQUAL, processor, None, "refuse"),
        (LOAD, NUMBER, None, None),
        (AT_LEAST, X32, "refuse", None),
        *((EQUAL, number, "refuse", None) for number in refused),
        # Its flags are in memory, which no filter sees. Without it the C library takes clone.
        (EQUAL, clone["clone3"], "unknown", None),
        (EQUAL, clone["clone"], None, "allow"),
        (LOAD, FIRST_ARGUMENT, None, None),
        (ANY_BIT, NEW_USER, "refuse", "allow"),
    ]
    ends = {"refuse": ERRNO | errno.EPERM, "unknown": ERRNO | errno.ENOSYS, "allow": ALLOW}
    places = {name: len(lines) + index for index, name in enumerate(ends)}
    coded = [
        (code, *(0 if place is None else places[place] - here - 1 for place in (yes, no)), value)
        for here, (code, value, yes, no) in enumerate(lines)
    ]
    coded += [(RETURN, 0, 0, value) for value in ends.values()]
    return b"".join(struct.pack("<HBBI", *line) for line in coded)
