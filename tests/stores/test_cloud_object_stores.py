"""Object stores in buckets, on real HTTP servers, and what networks and credentials do to them.

The stub of OSS was written from documentation: no test here has met the real service.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import opendal
import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.bodies import object_digest
from agentscope_durable.contracts.errors import (
    DigestMismatch,
    HostClosed,
    Incompatible,
    InvalidRequest,
    MissingExtra,
    NotFound,
    Retry,
    Unavailable,
    to_wire,
)
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.stores.objects import cloud
from agentscope_durable.stores.objects.cloud import OperatorObjectStore, OssObjectStore, S3ObjectStore
from agentscope_durable.testing.object_store import InspectedObjectStoreContract
from tests.servers.s3 import BUCKET, SECRET_KEY, Server, running

BODY = b"x" * 100_000
DIGEST = object_digest(BODY)
KINDS = {"moto": S3ObjectStore, "localbucket": S3ObjectStore, "oss": OssObjectStore}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("localbucket", tmp_path_factory.mktemp("bucket")) as started:
        yield started


@pytest.mark.spec("OB-01", "OB-02", "OB-07")
@pytest.mark.case("C87")
class TestCloudObjectStores(InspectedObjectStoreContract):
    """Every promise, on each server."""

    server: Server

    @pytest.fixture(autouse=True)
    def _on(self, server: Server) -> None:
        self.server = server

    async def open(self, place: Path) -> ObjectStore:
        # A folder of the bucket for each test.
        prefix = hashlib.sha256(str(place).encode()).hexdigest()[:12]
        return KINDS[self.server.kind](prefix=f"tests/{prefix}", **self.server.options)

    async def damage(self, store: ObjectStore, partition: str, digest: str, content: bytes) -> None:
        assert isinstance(store, OperatorObjectStore)
        store._operator.write(store._path(partition, digest), content)

    async def test_of_many_that_create_an_object_one_does_and_all_have_it(self, tmp_path: Path) -> None:
        stores = [await self.open(tmp_path) for _ in range(8)]
        await asyncio.gather(*(store.put("p", DIGEST, BODY) for store in stores))
        assert {await store.get("p", DIGEST) for store in stores} == {BODY}
        assert await stores[0].list("p") == [DIGEST]


class Gateway(ThreadingHTTPServer):
    """Stands between a store and its server, and does what networks and services do.

    Nothing is listed through it: while the client lists, no thread of this process runs.

    Attributes:
        lose: the next answers to requests of this method are lost, after the server has acted.
        refuse: status and code of the answer to everything, None: the server's own.
        hold: requests wait here until it is set.
    """

    daemon_threads = True

    def __init__(self, behind: Server) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = behind
        self.lose: dict[str, int] = {}
        self.refuse: tuple[int, str] | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.seen: list[str] = []

    @property
    def options(self) -> dict[str, Any]:
        return {**self.behind.options, "endpoint": f"http://127.0.0.1:{self.server_port}"}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no failure of the test."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        gateway = self.server
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with gateway.lock:
            gateway.seen.append(self.command)
            gateway.inside += 1
            gateway.most = max(gateway.most, gateway.inside)
        try:
            gateway.hold.wait()
            status, headers, body = self._answer(content)
        finally:
            with gateway.lock:
                gateway.inside -= 1
        if gateway.lose.get(self.command):
            gateway.lose[self.command] -= 1
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(body)))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

    def _answer(self, content: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        if self.server.refuse is not None:
            status, code = self.server.refuse
            said = f"{self.headers.get('Authorization')} {SECRET_KEY}"
            text = f"<Error><Code>{code}</Code><Message>{said}</Message><RequestId>1</RequestId></Error>"
            return status, [], text.encode()
        connection = http.client.HTTPConnection(urlsplit(self.server.behind.endpoint).netloc)
        try:
            connection.request(self.command, self.path, content, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


@pytest.fixture
def gateway(bucket: Server) -> Iterator[Gateway]:
    with Gateway(bucket) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.hold.set()
        started.shutdown()


@pytest.mark.spec("OB-08")
class TestNetworks:
    async def test_a_put_whose_answer_was_lost_is_settled_by_reading_back(
        self, gateway: Gateway, tmp_path: Path
    ) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, retries=0, **gateway.options)
        await store.check()
        gateway.lose["PUT"] = 1
        await store.put("p", DIGEST, BODY)
        assert gateway.lose == {"PUT": 0}
        assert await store.get("p", DIGEST) == BODY

    async def test_a_repeated_put_finds_its_own_object_and_is_content(self, gateway: Gateway, tmp_path: Path) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, retries=1, **gateway.options)
        await store.check()
        gateway.lose["PUT"] = 1
        before = gateway.seen.count("PUT")
        await store.put("p", DIGEST, BODY)
        assert gateway.seen.count("PUT") - before == 2
        assert await store.get("p", DIGEST) == BODY

    async def test_a_put_that_finds_other_bytes_there_says_so(self, bucket: Server, tmp_path: Path) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, **bucket.options)
        store._operator.write(store._path("p", DIGEST), b"others")
        with pytest.raises(DigestMismatch) as raised:
            await store.put("p", DIGEST, BODY)
        assert raised.value.expected == DIGEST

    async def test_what_may_pass_is_tried_again_within_a_bound(self, gateway: Gateway, tmp_path: Path) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, retries=2, **gateway.options)
        await store.put("p", DIGEST, BODY)
        gateway.seen.clear()
        gateway.refuse = 503, "SlowDown"
        with pytest.raises(Unavailable, match="SlowDown"):
            await store.get("p", DIGEST)
        assert gateway.seen == ["GET"] * 3
        gateway.refuse = None
        assert await store.get("p", DIGEST) == BODY

    async def test_a_service_that_cannot_be_reached_is_unavailable(self, bucket: Server) -> None:
        store = S3ObjectStore(retries=0, **{**bucket.options, "endpoint": "http://127.0.0.1:1"})
        for ask in (store.put("p", DIGEST, BODY), store.get("p", DIGEST), store.exists("p", DIGEST), store.list("p")):
            with pytest.raises(Unavailable, match="cannot be reached") as raised:
                await ask
            assert "s3://bodies of 127.0.0.1:1" in str(raised.value)

    async def test_a_service_that_does_not_answer_is_given_up(
        self, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = S3ObjectStore(timeout=0.2, retries=0, **gateway.options)
        gateway.hold.clear()
        for ask in (store.get("p", DIGEST), store.delete("p", DIGEST), store.check()):
            with pytest.raises(Unavailable, match="in time"):
                await ask
        gateway.hold.set()
        # A listing keeps this whole process waiting for its answer: it has a bound of its own.
        monkeypatch.setattr(cloud, "LIST_SECONDS_MAX", 0.2)
        with running("localbucket", tmp_path) as stopped:
            store = S3ObjectStore(timeout=300, retries=9, **stopped.options)
            os.kill(stopped.pid, signal.SIGSTOP)
            try:
                with pytest.raises(Unavailable, match="in time"):
                    await store.list("p")
            finally:
                os.kill(stopped.pid, signal.SIGCONT)

    async def test_requests_at_a_time_are_bounded_and_a_caller_that_left_keeps_its_place(
        self, gateway: Gateway, tmp_path: Path
    ) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, retries=0, **gateway.options)
        await store.put("p", DIGEST, BODY)
        gateway.hold.clear()
        gateway.most = 0
        reads = [asyncio.ensure_future(store.get("p", DIGEST)) for _ in range(3 * cloud.CALLS_MAX)]
        while gateway.inside < cloud.CALLS_MAX:
            await asyncio.sleep(0)
        for read in reads[: cloud.CALLS_MAX]:
            read.cancel()
        await asyncio.wait(reads[: cloud.CALLS_MAX])
        gateway.hold.set()
        assert await asyncio.gather(*reads[cloud.CALLS_MAX :]) == [BODY] * (2 * cloud.CALLS_MAX)
        assert gateway.most == cloud.CALLS_MAX

    async def test_killed_at_any_point_of_a_put_nothing_but_whole_objects_is_there(
        self, bucket: Server, tmp_path: Path
    ) -> None:
        program = """
            import asyncio, json, sys
            from agentscope_durable.stores.objects.cloud import S3ObjectStore
            from agentscope_durable.contracts.bodies import object_digest
            body = b"x" * 100_000
            store = S3ObjectStore(**json.loads(sys.argv[1]))
            asyncio.run(store.put("p", object_digest(body), body))
        """
        for point, there in (("object.put.before", False), ("object.put.after", True)):
            options = {**bucket.options, "prefix": f"{tmp_path.name}/{point}"}
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(program), json.dumps(options)],
                env={**os.environ, "DURABLE_FAILPOINT": point},
                check=False,
            )
            assert done.returncode == -9
            store = S3ObjectStore(**options)
            assert await store.list("p") == ([DIGEST] if there else [])
            await store.put("p", DIGEST, BODY)
            assert await store.get("p", DIGEST) == BODY


class TestServices:
    @pytest.mark.spec("OB-07")
    async def test_a_service_that_overwrites_is_refused_before_the_first_put(self, tmp_path: Path) -> None:
        with running("overwriting", tmp_path) as deaf:
            store = S3ObjectStore(**deaf.options)
            for ask in (store.check, lambda: store.put("p", DIGEST, BODY)):
                with pytest.raises(Incompatible, match="never overwrite"):
                    await ask()
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    async def test_a_service_is_tried_out_once_and_nothing_of_that_is_left(
        self, gateway: Gateway, tmp_path: Path
    ) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, **gateway.options)
        assert gateway.seen == []
        await store.check()
        assert gateway.seen == ["PUT", "PUT", "DELETE"]
        await store.put("p", DIGEST, BODY)
        assert gateway.seen.count("PUT") == 3
        behind = S3ObjectStore(prefix=tmp_path.name, **gateway.behind.options)
        assert [entry.path for entry in behind._operator.list("/")] == [f"{store.folder_of('p')}/"]

    @pytest.mark.spec("OB-03")
    async def test_the_applications_client_is_used_and_stays_its_own(self, bucket: Server, tmp_path: Path) -> None:
        client = opendal.Operator("s3", root=f"/{tmp_path.name}", **bucket.options)
        store = OperatorObjectStore(client)
        await store.put("p", DIGEST, BODY)
        await store.close()
        with pytest.raises(HostClosed):
            await store.get("p", DIGEST)
        assert bytes(client.read(f"{store.folder_of('p')}/{DIGEST}")) == BODY
        assert await OperatorObjectStore(client).get("p", DIGEST) == BODY

    @pytest.mark.parametrize(
        ("status", "code"), [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (404, "NoSuchBucket")]
    )
    async def test_what_a_service_refuses_is_named_and_no_secret_is_told(
        self, gateway: Gateway, caplog: pytest.LogCaptureFixture, status: int, code: str
    ) -> None:
        caplog.set_level(logging.DEBUG)
        store = S3ObjectStore(session_token="the-token", **gateway.options)
        gateway.refuse = status, code
        for ask in (store.put("p", DIGEST, BODY), store.get("p", DIGEST)):
            with pytest.raises(Retry, match=code) as raised:
                await ask
            assert not isinstance(raised.value, NotFound)
            assert "credentials" in raised.value.advice
            told = [repr(store), repr(raised.value), str(to_wire(raised.value)), caplog.text]
            assert raised.value.__cause__ is None and raised.value.__context__ is None
            assert not any(word in text for text in told for word in (SECRET_KEY, "the-token", "Signature="))
        assert gateway.seen == ["PUT", "GET"]

    async def test_a_listing_of_a_bucket_that_is_not_there_fails(self, bucket: Server) -> None:
        store = S3ObjectStore(**{**bucket.options, "bucket": "elsewhere"})
        for ask in (store.list("p"), store.folders(), store.check()):
            with pytest.raises(Unavailable, match="NoSuchBucket"):
                await ask

    async def test_an_object_that_is_not_there_says_where_it_was_looked_for(
        self, bucket: Server, tmp_path: Path
    ) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, **bucket.options)
        with pytest.raises(NotFound) as raised:
            await store.get("p", DIGEST)
        assert f"s3://{BUCKET}/{tmp_path.name} of 127.0.0.1" in str(raised.value)
        assert DIGEST in str(raised.value)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "path"),
        [
            ({"access_key_id": "k"}, "secret_access_key"),
            ({"secret_access_key": "hidden"}, "secret_access_key"),
            ({"nonsense": "hidden"}, "nonsense"),
            ({"root": "/elsewhere"}, "root"),
            ({"prefix": "a/../b"}, "prefix"),
            ({"timeout": 0}, "timeout"),
            ({"retries": -1}, "retries"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, options: dict[str, Any], path: str) -> None:
        with pytest.raises(InvalidRequest) as raised:
            S3ObjectStore(**{"bucket": "b", "region": "r", **options})
        assert raised.value.path == path
        assert "hidden" not in str(raised.value)

    def test_what_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(InvalidRequest, match="region"):
            S3ObjectStore(bucket="b", disable_config_load="true")
        with pytest.raises(InvalidRequest, match="bucket"):
            S3ObjectStore(bucket="", region="r")
        with pytest.raises(InvalidRequest, match="access_key_secret"):
            OssObjectStore(bucket="b", endpoint="http://127.0.0.1:1", access_key_id="k")

    def test_a_password_in_an_endpoint_is_not_told(self) -> None:
        assert repr(
            S3ObjectStore(bucket="b", region="r", endpoint="http://me:hidden@localhost:1/", prefix="/a/b/")
        ) == ("S3ObjectStore(s3://b/a/b of localhost:1)")

    def test_without_the_extra_it_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "opendal", None)
        monkeypatch.delitem(sys.modules, "agentscope_durable.stores.objects.cloud")
        with pytest.raises(MissingExtra, match=r"agentscope-durable\[objects\]"):
            importlib.import_module("agentscope_durable.stores.objects.cloud")


class TestUrls:
    def test_a_url_names_a_store(self) -> None:
        named = cloud.object_store_at("s3://b/a/b?region=r&endpoint=http://localhost:1")
        assert repr(named) == "S3ObjectStore(s3://b/a/b of localhost:1)"
        named = cloud.object_store_at("oss://b?endpoint=https://oss-cn-hangzhou.aliyuncs.com")
        assert repr(named) == "OssObjectStore(oss://b of oss-cn-hangzhou.aliyuncs.com)"

    @pytest.mark.parametrize(
        "url",
        [
            "b/a",
            "file:///a",
            "s3:///a",
            "s3://key:hidden@b/a?region=r",
            "s3://b?region=r&secret_access_key=hidden",
            "s3://b?region=r&session_token=hidden",
            "s3://b?region=r&nonsense=hidden",
            "oss://b",
            "s3://b?region=r&timeout=hidden",
            "s3://b?region=r&bucket=hidden",
        ],
    )
    def test_what_is_none_is_refused_and_not_repeated(self, url: str) -> None:
        with pytest.raises(InvalidRequest) as raised:
            cloud.object_store_at(url)
        assert "hidden" not in str(raised.value)


class TestBackends:
    """How a backend treats an object store that it is given."""

    @pytest.mark.spec("OB-03")
    async def test_it_stays_open_when_the_backend_closes(self, bucket: Server, tmp_path: Path) -> None:
        store = S3ObjectStore(prefix=tmp_path.name, **bucket.options)
        for _ in range(2):
            async with LocalBackend.open(tmp_path / "store", object_store=store):
                pass
        await store.put("p", DIGEST, BODY)

    @pytest.mark.spec("OB-07")
    async def test_one_that_overwrites_is_refused_when_the_backend_is_opened(self, tmp_path: Path) -> None:
        with running("overwriting", tmp_path / "bucket") as deaf, pytest.raises(Incompatible, match="never overwrite"):
            await LocalBackend.open(tmp_path / "store", object_store=S3ObjectStore(**deaf.options))
        assert list((tmp_path / "store").iterdir()) == []

    async def test_who_only_reads_writes_nothing_to_try_it_out(self, gateway: Gateway, tmp_path: Path) -> None:
        async with LocalBackend.open(tmp_path / "store"):
            pass
        store = S3ObjectStore(prefix=tmp_path.name, **gateway.options)
        async with LocalBackend.open(tmp_path / "store", read_only=True, object_store=store):
            pass
        assert gateway.seen == []
