"""Perfetto's trace processor, which imports traces for its user interface and answers queries in SQL.

Perfetto offers it as a program on a server of its own. Debian's package ``chromium-shell`` has it as a library of
Chromium's tests. Its C++ class (``base/test/trace_processor`` in Chromium's sources) is called here by ctypes, with
strings and vectors laid out as libc++ does. That is right for x86-64 alone, and a mistake ends the process, so queries
run in one of their own.
"""

import ctypes
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = Path("/usr/lib/chromium/libtest_trace_processor.so")
_CLASS = "base4test22TestTraceProcessorImpl"
_STRING = "NSt3__112basic_stringIcNS2_11char_traitsIcEENS2_9allocatorIcEEEE"
_CONSTRUCT = f"_ZN4{_CLASS}C1Ev"
_PARSE = f"_ZN4{_CLASS}10ParseTraceERKNSt3__16vectorIcNS2_9allocatorIcEEEE"
_QUERY = f"_ZNK4{_CLASS}12ExecuteQueryERK{_STRING}"
_OK = 1
"""The representation of absl's OkStatus."""
_WORD = 8
_OBJECT = 3 * _WORD
"""Bytes of a string or a vector."""
_INSTANCE = 256
"""Bytes for an instance of the class or of a result: more than either needs."""


def is_installed() -> bool:
    """Whether the library is there and has the functions that are called here."""
    return LIBRARY.exists() and platform.machine() == "x86_64" and hasattr(ctypes.CDLL(str(LIBRARY)), _QUERY)


def query(trace: Path, *statements: str) -> list[list[dict[str, str]]]:
    """Imports a trace and returns the rows of every statement, by column. All values are texts.

    Raises RuntimeError if the trace or a statement is refused.
    """
    words = [sys.executable, "-m", __name__, str(trace), *statements]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"the trace processor ended with {done.returncode}")
    return json.loads(done.stdout)


class _Processor:
    def __init__(self, trace: bytes) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        self._instance = ctypes.create_string_buffer(_INSTANCE)
        self._library[_CONSTRUCT](ctypes.byref(self._instance))
        content = ctypes.create_string_buffer(trace, len(trace))
        begin = ctypes.addressof(content)
        end = begin + len(trace)
        status = self._call(_PARSE, (begin, end, end))
        if status[0] != _OK:
            raise SystemExit("the trace processor refuses the trace")

    def rows(self, statement: str) -> list[dict[str, str]]:
        text = statement.encode()
        content = ctypes.create_string_buffer(text)
        # The lowest bit of a capacity says that the text lies elsewhere.
        words = self._call(_QUERY, (len(content) | 1, len(text), ctypes.addressof(content)))
        error = _text(ctypes.addressof(words) + _OBJECT)
        if error:
            raise SystemExit(error)
        names, *rows = ([_text(cell) for cell in _objects(row)] for row in _objects(ctypes.addressof(words)))
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _call(self, name: str, argument: tuple[int, int, int]) -> Any:
        """Calls a method with a string or a vector. Returns the memory of its result, whose address goes first."""
        result = (ctypes.c_uint64 * (_INSTANCE // _WORD))()
        function = self._library[name]
        function.restype = None
        function(ctypes.byref(result), ctypes.byref(self._instance), ctypes.byref((ctypes.c_uint64 * 3)(*argument)))
        return result


def _objects(vector: int) -> Iterator[int]:
    """Yields the addresses of the strings or vectors in a vector."""
    begin, end = (ctypes.c_uint64.from_address(vector + offset).value for offset in (0, _WORD))
    yield from range(begin, end, _OBJECT)


def _text(string: int) -> str:
    """Reads a string: behind a byte with twice its length, or elsewhere if that byte is odd."""
    first = ctypes.c_ubyte.from_address(string).value
    if first % 2 == 0:
        return ctypes.string_at(string + 1, first // 2).decode()
    size, address = (ctypes.c_uint64.from_address(string + offset).value for offset in (_WORD, 2 * _WORD))
    return ctypes.string_at(address, size).decode()


def main() -> None:
    """Prints the rows of statements about a trace as JSON."""
    trace, *statements = sys.argv[1:]
    processor = _Processor(Path(trace).read_bytes())
    print(json.dumps([processor.rows(statement) for statement in statements]))


if __name__ == "__main__":
    main()
