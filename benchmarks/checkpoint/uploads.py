"""Saves to an S3 that is some way off: streamed, as they are now, beside staged on the local disk, as they were.

    python -m benchmarks.checkpoint.uploads [--json] [--gb 0.5] [--rounds 3] [--delay-s 0.05] [--mb-per-s 80]

Both sides write one part of a commit's size in pieces of 1 MiB, as saves do, to a server of this machine that drops
what it gets, answers `--delay-s` late, and takes `--mb-per-s` from each connection at most. The last line is JSON:

* `streamed_s`, `staged_s`: medians of the whole write;
* `streamed_vs_staged`: their ratio (goal: at most 1.0);
* `peak_mb`: by how much each side's peak of memory grew; `disk_mb`: what it had on the local disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from elastic_train.checkpoint.stores.fsspec_store import FsspecStore

PIECE = os.urandom(1 << 20)
SIDES = ("streamed", "staged")


class Sink:
    """The part of S3 that an upload needs; keeps only the objects' sizes."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s
        self._sizes: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        try:
            while True:
                await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        if b"100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        left, began = int(length[1]) if length else 0, time.monotonic()
        size = left
        while left:
            left -= len(await reader.read(min(left, 1 << 20)))
            await asyncio.sleep(max(0.0, (size - left) / self._bytes_per_s - (time.monotonic() - began)))
        await asyncio.sleep(self._delay_s)
        path, query = urlsplit(target).path, urlsplit(target).query
        body, fields = b"", ['etag: "x"']
        if method == "PUT":
            self._sizes[path] = size + (self._sizes[path] if "partNumber" in query else 0)
        elif method == "POST" and "uploads" in query:
            self._sizes[path] = 0
            body = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        elif method == "POST":
            body = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        shown = self._sizes.get(path, 0) if method == "HEAD" else len(body)
        answer = ["HTTP/1.1 200 OK", f"content-length: {shown}", "content-type: application/xml", *fields, "", ""]
        writer.write("\r\n".join(answer).encode() + body)


def serve(delay_s: float, bytes_per_s: float, ready: Connection) -> None:
    """Serve until the process is ended."""

    async def run() -> None:
        server = await asyncio.start_server(Sink(delay_s, bytes_per_s).serve, "127.0.0.1", 0, limit=1 << 20)
        ready.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())


def write(side: str, url: str, num_pieces: int) -> dict[str, float]:
    """Write a file and return its cost, including its process's memory."""
    store = FsspecStore(f"s3://commits/{side}", {"endpoint_url": url, "key": "a", "secret": "b"})
    with store.write("small") as sink:
        sink.write(b"a first request opens the connection")
    before, started, on_disk = _peak_mb(), time.perf_counter(), 0.0
    if side == "streamed":
        with store.write("large") as sink:
            for _ in range(num_pieces):
                sink.write(PIECE)
    else:
        with tempfile.NamedTemporaryFile() as staged:
            for _ in range(num_pieces):
                staged.write(PIECE)
            staged.flush()
            store._fs.put_file(staged.name, "commits/staged/large")
            on_disk = Path(staged.name).stat().st_size / 1e6
    return {"seconds": time.perf_counter() - started, "peak_mb": _peak_mb() - before, "disk_mb": on_disk}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Measure both sides in turn, each in its own process; print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.uploads", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-s", type=float, default=0.05)
    parser.add_argument("--mb-per-s", type=float, default=80.0)
    chosen = parser.parse_args()
    spawning = multiprocessing.get_context("spawn")
    mine, theirs = spawning.Pipe()
    server = spawning.Process(target=serve, args=(chosen.delay_s, chosen.mb_per_s * 1e6, theirs), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(chosen.rounds):
        for side in SIDES:
            with spawning.Pool(1) as pool:
                runs[side].append(pool.apply(write, (side, url, round(chosen.gb * 1e9) >> 20)))
    server.terminate()
    found = {
        side: {name: statistics.median(run[name] for run in runs[side]) for name in runs[side][0]} for side in SIDES
    }
    ratio = found["streamed"]["seconds"] / found["staged"]["seconds"]
    if not chosen.json:
        for side, figures in found.items():
            print(f"{side}: {', '.join(f'{name} {value:.2f}' for name, value in figures.items())}")
    print(
        json.dumps(
            {
                **{f"{side}_s": round(found[side]["seconds"], 2) for side in SIDES},
                "streamed_vs_staged": round(ratio, 2),
                "peak_mb": {side: round(found[side]["peak_mb"]) for side in SIDES},
                "disk_mb": {side: round(found[side]["disk_mb"]) for side in SIDES},
            }
        )
    )


if __name__ == "__main__":
    main()
