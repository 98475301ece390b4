"""Checksums that detect damaged files and items."""

from typing import Annotated

import xxhash
from pydantic import Field

Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""64-bit XXH3 in hexadecimal. It is as fast as reading memory, while CRC-32 takes longer than reading the file."""

Hasher = xxhash.xxh3_64
"""Incremental form: construct it with the first bytes, pass the next ones to ``update``, read ``hexdigest`` at the
end."""


def checksum_of(data: bytes | memoryview) -> str:
    return Hasher(data).hexdigest()
