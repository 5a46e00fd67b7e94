"""A minimal S3 for reading a folder with little CPU time: GET and HEAD of objects and of their ranges.

    python -m benchmarks.data.light_store FOLDER [--delay-s 0.05 ...]

Serves the folder as the bucket `rows`, with the same faults as `benchmarks.slow_network`, prints its address, and ends
when its input does. Bytes go from the page cache into the socket, so that the reader is measured and not the store.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

from benchmarks.slow_network import Trouble, add_trouble

_PREFIX = "/rows/"


class LightStore:
    """The objects of a folder, without access control."""

    def __init__(self, folder: Path, trouble: Trouble, seed: int = 0) -> None:
        self._folder, self._trouble, self._chance = folder, trouble, random.Random(seed)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        try:
            while await self._answer(await reader.readuntil(b"\r\n\r\n"), writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; return True if the connection stays open."""
        line, *headers = request.decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
        range_ = next((header[6:].strip() for header in headers if header.lower().startswith("range:")), "")
        what = self._trouble.draw(self._chance) if method == "GET" else "answered"
        await asyncio.sleep(self._trouble.delay_s + (self._trouble.late_s if what == "late" else 0))
        path = self._folder / unquote(urlsplit(target).path).removeprefix(_PREFIX)
        if what == "refused" or not path.is_file():
            status = HTTPStatus.SERVICE_UNAVAILABLE if what == "refused" else HTTPStatus.NOT_FOUND
            writer.write(_head(status, "content-length: 0"))
            return True
        with path.open("rb") as file:
            seen = os.fstat(file.fileno())
            lo, hi, fields = 0, seen.st_size, [f'etag: "{seen.st_mtime_ns:x}-{seen.st_size:x}"']
            if range_:
                first, _, last = range_.removeprefix("bytes=").partition("-")
                lo, hi = int(first), min(hi, int(last or hi) + 1)
                fields.append(f"content-range: bytes {lo}-{hi - 1}/{seen.st_size}")
            status = HTTPStatus.PARTIAL_CONTENT if range_ else HTTPStatus.OK
            writer.write(
                _head(status, f"content-length: {hi - lo}", "last-modified: Thu, 01 Jan 2026 00:00:00 GMT", *fields)
            )
            if method == "GET":
                size = (hi - lo) // 2 if what == "broken" else hi - lo
                await asyncio.get_running_loop().sendfile(writer.transport, file, lo, size)
        return what != "broken"


def _head(status: HTTPStatus, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status.value} {status.phrase}", *fields, "", ""]).encode()


async def _run(store: LightStore) -> None:
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0, backlog=256)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_trouble(parser)
    chosen = vars(parser.parse_args())
    folder = chosen.pop("folder")
    asyncio.run(_run(LightStore(folder, Trouble(**chosen))))


if __name__ == "__main__":
    main()
