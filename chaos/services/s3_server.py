"""A local S3 that returns errors on demand: moto's server behind a layer that modifies its answers.

Needs moto, as the tests do. Its contents are in memory and are lost with it; `mirror` writes the commits with their
files to a folder for the judge.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.errors import ChaosError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

BUCKET = "chaos"
_ANSWERS = {
    "storage_errors": ("500 Internal Server Error", "InternalError"),
    "storage_conflict": ("409 Conflict", "ConditionalRequestConflict"),
    "storage_taken": ("412 Precondition Failed", "PreconditionFailed"),
}
_SLOW_S = 1.5
_EVERY = 2
"""While faulty, one request in this many succeeds, so that some operations get half done."""


class S3:
    """A local S3: `with S3() as s3: … s3.url`; `s3.heal(number)` ends only the fault of that `s3.spoil(kind)`."""

    def __init__(self) -> None:
        try:
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
            from werkzeug.serving import make_server
        except ImportError as error:
            raise ChaosError("an S3 for faults needs moto: pip install 'moto[server]'") from error
        self._moto: WSGIApplication = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
        self._spoilt: tuple[tuple[int, str], ...] = ()  # replaced as a whole: other threads read it
        self._num_begun = 0
        self._count = 0
        self.spoilt = Counter[int]()
        """Number of affected requests, by fault number."""
        self._creating = threading.Lock()
        """Held by a conditional create: of two at once, moto lets both succeed, which S3 never does."""
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for processes that use this S3."""
        environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        return environ | {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos"}

    def url(self, run: str) -> str:
        return f"s3://{BUCKET}/{run}"

    def spoil(self, kind: str) -> int:
        """Start a fault and return its number for `heal`; of overlapping faults, the newest takes effect."""
        self._num_begun += 1
        self._spoilt += ((self._num_begun, kind),)
        return self._num_begun

    def heal(self, number: int) -> None:
        """End one fault; other faults remain."""
        self._spoilt = tuple(begun for begun in self._spoilt if begun[0] != number)

    def mirror(self, run: str, folder: Path) -> None:
        """Write a run's commits, records and files, below `folder`, in the layout of a local store."""
        (folder / "commits").mkdir(exist_ok=True)
        self._spoilt = ()
        client = self._client()
        for part in ("commits", "data"):
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{run}/{part}/"):
                for entry in page.get("Contents", []):
                    path = folder / str(entry["Key"]).removeprefix(f"{run}/")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read())

    def __enter__(self) -> S3:
        threading.Thread(target=self._server.serve_forever, name="s3", daemon=True).start()
        self._client().create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _client(self) -> Any:
        import boto3  # type: ignore[import-untyped]

        environ = self.environ
        return boto3.client(
            "s3",
            endpoint_url=environ["AWS_ENDPOINT_URL"],
            region_name=environ["AWS_DEFAULT_REGION"],
            aws_access_key_id=environ["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
        )

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer a request, subject to the current fault: conflicts affect only creates, other faults all requests."""
        number, kind = self._spoilt[-1] if self._spoilt else (0, None)
        creates = environ["REQUEST_METHOD"] in ("PUT", "POST") and "HTTP_IF_NONE_MATCH" in environ
        if kind == "no_conditional_create":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        elif kind == "storage_slow":
            self.spoilt[number] += 1
            time.sleep(_SLOW_S)
        elif kind == "storage_errors" or (kind in _ANSWERS and creates):
            self._count += 1
            if self._count % _EVERY:
                self.spoilt[number] += 1
                status, code = _ANSWERS[kind]
                body = f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
                return [body]
        if not creates:
            return self._moto(environ, start)
        with self._creating:
            return list(self._moto(environ, start))
