"""Object stores as real HTTP servers on this machine, for tests: `with running("moto", folder)`.

    moto         moto's S3, in memory
    localbucket  an S3 on a folder
    overwriting  the same, deaf to If-None-Match, as some that speak S3 are
    oss          the few requests of Alibaba Cloud OSS that are needed, written from its documentation and from what
                 opendal sends. UNVERIFIED: no test here has ever met the real service

Each runs in a process of its own, which ends when whoever started it has gone, in whatever way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bodies"
ACCESS_KEY = "AKIDTESTS"
SECRET_KEY = "the-secret-of-these-tests"


@dataclass(frozen=True)
class Server:
    """A running server with an empty bucket.

    Attributes:
        pid: of its process, to stop it for a while.
    """

    kind: str
    endpoint: str
    pid: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the object store for it."""
        if self.kind == "oss":
            secret = {"access_key_secret": SECRET_KEY, "addressing_style": "path"}
        else:
            # Nothing of the machine the tests run on is asked for.
            secret = {"secret_access_key": SECRET_KEY, "region": "us-east-1", "disable_config_load": "true"}
        return {"bucket": BUCKET, "endpoint": self.endpoint, "access_key_id": ACCESS_KEY, **secret}


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Server]:
    """A server that was started for this, and ends with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "DURABLE_"))}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, kind, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said:
                raise RuntimeError(f"the object store {kind!r} did not start")
            yield Server(kind, f"http://127.0.0.1:{int(said)}", process.pid)
        finally:
            process.stdin.close()
            process.kill()


# ---- in the process of the server ----


class Oss(BaseHTTPRequestHandler):
    """Objects of one bucket in memory, by OSS's own protocol, addressed by path. Signatures are not looked at."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes] = {}
    lock = threading.Lock()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").removeprefix("/")

    def _answer(self, status: int, body: bytes = b"", *, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(
            status,
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>refused</Message>'
            "<RequestId>1</RequestId><HostId>stub</HostId></Error>".encode(),
        )

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.lock:
            if self.headers.get("x-oss-forbid-overwrite") == "true" and self._key() in self.objects:
                self._refuse(409, "FileAlreadyExists")
                return
            self.objects[self._key()] = content
        self._answer(200, headers={"ETag": '"0"'})

    def do_GET(self) -> None:
        if not self._key():
            self._list({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
            return
        content = self.objects.get(self._key())
        if content is None:
            self._refuse(404, "NoSuchKey")
        else:
            stamp = "Mon, 30 Nov 2026 12:00:00 GMT"
            self._answer(200, content, headers={"ETag": '"0"', "Last-Modified": stamp})

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        with self.lock:
            self.objects.pop(self._key(), None)
        self._answer(204)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        # A client asks for as many as it likes; a page of this server is small, so that there are pages.
        limit = min(int(query.get("max-keys", "1000")), 10)
        found: dict[str, str] = {}
        with self.lock:
            names = sorted(self.objects)
        for name in names:
            if name.startswith(prefix) and name > after:
                head, slash, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
                entry = prefix + head + slash if slash else name
                if entry > after:
                    found.setdefault(entry, "CommonPrefixes" if slash else "Contents")
        page = list(found)[:limit]
        more = len(found) > len(page)
        parts = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for entry in page:
            if found[entry] == "Contents":
                stamp = "<LastModified>2026-11-30T12:00:00.000Z</LastModified>"
                parts.append(f"<Contents><Key>{escape(entry)}</Key>{stamp}<ETag>0</ETag><Size>1</Size></Contents>")
            else:
                parts.append(f"<CommonPrefixes><Prefix>{escape(entry)}</Prefix></CommonPrefixes>")
        self._answer(200, f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode())


def _moto() -> int:
    import logging

    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").disabled = True
    sys.stdout = sys.stderr
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).create_bucket(Bucket=BUCKET)
    return port


def _localbucket(folder: Path, *, deaf: bool) -> int:

    import localbucket

    class Handler(localbucket.S3Handler):
        def do_PUT(self) -> None:
            if deaf:
                del self.headers["If-None-Match"]
            super().do_PUT()

    Handler.data_root = folder.resolve()
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    return _serve(Handler)


def _oss() -> int:

    return _serve(Oss)


def _serve(handler: type[BaseHTTPRequestHandler]) -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def main(kind: str, folder: Path) -> None:
    out = sys.stdout
    match kind:
        case "moto":
            port = _moto()
        case "localbucket" | "overwriting":
            port = _localbucket(folder, deaf=kind == "overwriting")
        case "oss":
            port = _oss()
        case other:
            raise ValueError(other)
    print(port, file=out, flush=True)
    # Ends when whoever started this has gone.
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
