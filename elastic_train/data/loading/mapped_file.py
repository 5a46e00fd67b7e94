"""A memory-mapped file: pages are read on use, or all at once by `populate`.

pyarrow's own mapping asks the kernel for the whole file as soon as a buffer is made, so a first batch of a few rows
waits for megabytes; Python's keeps a descriptor open while the mapping lives.
"""

from __future__ import annotations

import ctypes
import mmap

import pyarrow as pa

_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock in every call
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """The first `size` bytes of an open file, read-only; mapped while this object or its buffer is in use."""

    def __init__(self, file: int, size: int) -> None:
        self._size, self._address = size, _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if self._address == _FAILED:
            self._size = 0
            raise OSError(ctypes.get_errno(), f"{size} bytes of a file could not be mapped into memory")

    def __del__(self) -> None:
        if self._size:
            _libc.munmap(self._address, self._size)

    @property
    def buffer(self) -> pa.Buffer:
        """The bytes, without a copy."""
        return pa.foreign_buffer(self._address, self._size, base=self)

    def populate(self) -> None:
        """Read all of it now if the kernel can (Linux 5.14); otherwise pages are read on use."""
        _libc.madvise(self._address, self._size, _MADV_POPULATE_READ)
