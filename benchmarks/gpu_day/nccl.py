"""Makes NCCL small enough to carry: ``python -m benchmarks.gpu_day.nccl libnccl.so.2 FILE --architecture 90``.

NCCL has the code of every GPU, about 250 MB. The copy has that of one architecture, and zeros in the place of all else,
so that ``xz`` leaves about 40 MB. Several ranks on one GPU need NCCL 2.30, and torch may bring an older one.
"""

import argparse
import struct
from pathlib import Path

MAGIC, VERSION, HEADER = 0xBA55ED50, 1, struct.Struct("<IHHQ")
"""A fat binary of CUDA begins with these two numbers, the size of its header, and the bytes behind that."""
ENTRY, ARCHITECTURE = struct.Struct("<HHIQ"), 28
"""An entry begins with its kind, a version, the size of its header and the bytes behind that. The number of its
architecture comes 28 bytes after its beginning."""
MACHINE_CODE = 2
"""The kind of an entry. Others have code that the driver would compile."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day.nccl", description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("copy", type=Path, metavar="FILE")
    parser.add_argument("--architecture", type=int, required=True, help="10 times the compute capability, such as 90")
    options = parser.parse_args()
    content = bytearray(options.library.read_bytes())
    if not keep_only(content, options.architecture):
        raise SystemExit(f"{options.library} has no code for architecture {options.architecture}")
    options.copy.write_bytes(content)


def keep_only(content: bytearray, architecture: int) -> int:
    """Fills the code of all other architectures with zeros. Returns the bytes of code that stay."""
    stay, at = 0, 0
    beginning = struct.pack("<IH", MAGIC, VERSION)
    while (at := content.find(beginning, at)) >= 0:
        _, _, header, behind = HEADER.unpack_from(content, at)
        entry, at = at + header, at + header + behind
        while entry < at:
            kind, _, header, size = ENTRY.unpack_from(content, entry)
            (found,) = struct.unpack_from("<I", content, entry + ARCHITECTURE)
            code = entry + header
            if (kind, found) == (MACHINE_CODE, architecture):
                stay += size
            else:
                content[code : code + size] = bytes(size)
            entry = code + size
    return stay


if __name__ == "__main__":
    main()
