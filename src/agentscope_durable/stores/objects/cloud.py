"""Large bodies in a bucket: `<prefix>/<hash of the Session>/<name>`, on S3, what speaks S3, and Alibaba Cloud OSS.

Rule 1: an object is created and never written again (`If-None-Match: *`, OSS: forbid overwrite). Whether the service
really refuses a second writer is tried out before the first put: some that speak S3 do not.
Rule 2: a write whose answer was lost is settled by reading back.
Rule 3: no text of the client's errors goes further. It may quote requests, and those hold credentials.
Rule 4: the client is called in threads: its asynchronous calls can abort the interpreter at exit. Its listing keeps
the interpreter's lock while it waits for an answer, so a listing is cut off after LIST_SECONDS_MAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import (
    DurableError,
    HostClosed,
    Incompatible,
    InvalidRequest,
    MissingExtra,
    NotFound,
    Unavailable,
)
from agentscope_durable.spi.environment import SYSTEM, Environment, call_in_own_thread
from agentscope_durable.stores.objects._names import check_limit, check_name, folder_name, not_found, verify

try:
    import opendal
    from opendal import exceptions, layers
    from opendal.config import OssConfig, S3Config
except ImportError as error:
    raise MissingExtra("an object store on S3 or OSS", "objects") from error

__all__ = ["CALLS_MAX", "LIST_SECONDS_MAX", "OperatorObjectStore", "OssObjectStore", "S3ObjectStore", "object_store_at"]

T = TypeVar("T")

CALLS_MAX: Final = 8
"""Requests of one store at a time; each waits in a thread of its own."""
LIST_SECONDS_MAX: Final = 5.0
"""A page of a listing that takes longer is given up: nothing else of the process runs meanwhile (Rule 4)."""
RETRIES: Final = 3
RETRY_SECONDS: Final = (0.1, 2.0)
"""The pause before the first retry, and the longest one."""
TIMEOUT: Final = 30.0
"""Seconds of one try of one request."""
PROBE: Final = b"agentscope-durable tries whether this store overwrites objects"

_ERRORS: Final = tuple(
    kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_THERE: Final = (exceptions.AlreadyExists, exceptions.ConditionNotMatch)
_REFUSED: Final = (exceptions.PermissionDenied, exceptions.ConfigInvalid)
_CODE: Final = re.compile(r'code: "(\w{1,64})"')
_NO_BUCKET: Final = "NoSuchBucket"


class OperatorObjectStore:
    """An `ObjectStore` on the application's own `opendal.Operator`, which stays the application's (OB-03).

    Retries and time-outs are those of the operator's layers. `close` ends this store and leaves the operator as it is.

    Args:
        operator: of a service that can create an object only if it is not there.
        location: how messages name it; by default as the operator describes itself, which holds no secret.
        environment: where its threads and names come from.

    Raises:
        Incompatible: the service has no such write.
    """

    persistent = True

    def __init__(
        self, operator: opendal.Operator, *, location: str | None = None, environment: Environment = SYSTEM
    ) -> None:
        self._operator = operator
        self._location = location or repr(operator)
        self._environment = environment
        self._listing = operator.layer(layers.TimeoutLayer(timeout=LIST_SECONDS_MAX, io_timeout=LIST_SECONDS_MAX))
        self._slots = asyncio.Semaphore(CALLS_MAX)
        self._checked = False
        self._closed = False
        if not operator.capability().write_with_if_not_exists:
            raise self._overwrites("a service without them")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._location})"

    async def check(self) -> None:
        """Try out that the store can be used and does not overwrite: a small object is made twice and removed.

        Once per store, before its first put at the latest.

        Raises:
            Incompatible: it overwrites.
            Unavailable: it cannot be reached, or does not let this in.
        """
        if not self._checked:
            await self._call(self._try_out)
            self._checked = True

    async def put(self, partition: str, name: str, content: bytes) -> None:
        check_name(name)
        path = self._path(partition, name)
        await self.check()
        await self._call(lambda: self._put(path, name, content))

    async def get(self, partition: str, name: str) -> bytes:
        check_name(name)
        path = self._path(partition, name)
        return await self._call(lambda: self._get(path, name))

    async def exists(self, partition: str, name: str) -> bool:
        check_name(name)
        path = self._path(partition, name)
        return await self._call(lambda: self._operator.exists(path))

    async def delete(self, partition: str, name: str) -> None:
        check_name(name)
        await self.remove_from(folder_name(partition), name)

    async def remove_from(self, folder: str, name: str) -> None:
        def remove() -> None:
            _failpoints.hit("object.delete.before")
            self._operator.delete(f"{folder}/{name}")
            _failpoints.hit("object.delete.after")

        await self._call(remove)

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        return await self.names_in(folder_name(partition), after, limit)

    async def names_in(self, folder: str, after: str = "", limit: int = 1000) -> list[str]:
        check_limit(limit)
        place = f"{folder}/"

        def names() -> list[str]:
            start = place + after if after else None
            found = self._listing.list(place, recursive=True, start_after=start, limit=limit)
            paths = (entry.path for entry in found)
            return list(islice((path.removeprefix(place) for path in paths if path > place + after), limit))

        return await self._call(names)

    def folder_of(self, partition: str) -> str:
        return folder_name(partition)

    async def folders(self, after: str = "", limit: int = 1000) -> list[str]:
        check_limit(limit)

        def names() -> Iterator[str]:
            # "0" follows "/": what begins with `after/` is passed over.
            for entry in self._listing.list("/", start_after=f"{after}0" if after else None, limit=limit):
                name, slash, rest = entry.path.partition("/")
                if slash and not rest and name > after:
                    yield name

        return await self._call(lambda: list(islice(names(), limit)))

    async def close(self) -> None:
        self._closed = True

    def _path(self, partition: str, name: str) -> str:
        return f"{folder_name(partition)}/{name}"

    def _put(self, path: str, name: str, content: bytes) -> None:
        verify(name, content)
        _failpoints.hit("object.put.before")
        try:
            self._operator.write(path, content, if_not_exists=True)
        except _THERE:
            # Put by another, or by this very request whose answer was lost and which the client repeated.
            self._get(path, name)
        except _ERRORS as error:
            if isinstance(error, _REFUSED) or not self._is_there(path, name):
                raise
        _failpoints.hit("object.put.after")

    def _is_there(self, path: str, name: str) -> bool:
        try:
            self._get(path, name)
        except (NotFound, *_ERRORS):
            return False
        return True

    def _get(self, path: str, name: str) -> bytes:
        try:
            content = self._operator.read(path)
        except exceptions.NotFound as error:
            if _code(error) == _NO_BUCKET:
                raise
            raise not_found(name, self._location) from None
        return verify(name, bytes(content))

    def _try_out(self) -> None:
        path = f"probe-{self._environment.random_bytes(8).hex()}"
        with contextlib.suppress(*_THERE):  # Its answer was lost, and the client repeated it.
            self._operator.write(path, PROBE, if_not_exists=True)
        try:
            self._operator.write(path, PROBE, if_not_exists=True)
        except _THERE:
            pass
        else:
            raise self._overwrites("a service that overwrites")
        finally:
            self._operator.delete(path)

    def _overwrites(self, what: str) -> Incompatible:
        return Incompatible(
            f"an object store at {self._location}", required="writes that create and never overwrite", present=what
        ).advising("Use a service that honours If-None-Match, or a newer release of it")

    async def _call(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise HostClosed("object store")
        await self._slots.acquire()
        loop = asyncio.get_running_loop()

        def done() -> None:
            # When the work has ended, not when its caller has gone: that is what is bounded.
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for a place any more.
                loop.call_soon_threadsafe(self._slots.release)

        def translated() -> T:
            try:
                return work()
            except _ERRORS as error:
                failure = self._translate(error)
            finally:
                done()
            # Outside of the handler: no context leads to the client's text, nor to a lister, which ends in this thread.
            raise failure

        return await call_in_own_thread(self._environment, translated, name="durable objects")

    def _translate(self, error: Exception) -> DurableError:
        code, text = _code(error), str(error)
        if isinstance(error, _REFUSED) or code == _NO_BUCKET:
            return Unavailable(
                f"the object store at {self._location} refused a request: {_reason(code, error)}"
            ).advising(
                "Check its bucket, region and credentials, which must allow to read, write, list and delete there; "
                "then ask again, with the same request id"
            )
        if "timeout reached" in text:
            problem = "did not answer in time"
        elif code is None and "send http request" in text:
            problem = "cannot be reached"
        else:
            problem = f"failed: {_reason(code, error)}"
        return Unavailable(f"the object store at {self._location} {problem}")


def _code(error: Exception) -> str | None:
    """The service's own word for what went wrong, if it gave one."""
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def _reason(code: str | None, error: Exception) -> str:
    return code or type(error).__name__


class S3ObjectStore(OperatorObjectStore):
    """Large bodies in a bucket of Amazon S3, MinIO, or another service that speaks S3 and never overwrites (OB-01).

    It needs the extra `[objects]`. Nothing is asked of the service before the first use.

    Args:
        bucket: it must exist.
        endpoint: URL of the service; None: Amazon's.
        region: of the bucket; None: from the environment. A MinIO as it is installed calls itself "us-east-1".
        prefix: a folder of the bucket for this store alone.
        access_key_id, secret_access_key, session_token: None: from where Amazon's tools find them: environment,
            `~/.aws`, the machine's role.
        timeout: seconds of one try of a request.
        retries: further tries of a request that failed and may succeed.
        environment: time, chance and threads.
        options: further options of opendal's service `s3`, such as `server_side_encryption` or `role_arn`.

    Raises:
        InvalidRequest: something is missing, or is no option.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint: str | None = None,
        region: str | None = None,
        prefix: str = "",
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        environment: Environment = SYSTEM,
        **options: str,
    ) -> None:
        _both(access_key_id, secret_access_key, "secret_access_key")
        given = {
            "bucket": bucket,
            "endpoint": endpoint,
            "region": region,
            "root": _root(prefix),
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
            "session_token": session_token,
        }
        operator = _operator("s3", given, options, S3Config.__annotations__.keys(), timeout, retries)
        super().__init__(operator, location=_location("s3", bucket, prefix, endpoint), environment=environment)


class OssObjectStore(OperatorObjectStore):
    """Large bodies in a bucket of Alibaba Cloud OSS, by its own protocol (OB-01).

    It needs the extra `[objects]`. Nothing is asked of the service before the first use.

    Args:
        bucket: it must exist.
        endpoint: URL of the region's service, like `https://oss-cn-hangzhou.aliyuncs.com`.
        prefix: a folder of the bucket for this store alone.
        access_key_id, access_key_secret, security_token: None: from the environment, as Alibaba's tools find them.
        timeout: seconds of one try of a request.
        retries: further tries of a request that failed and may succeed.
        environment: time, chance and threads.
        options: further options of opendal's service `oss`, such as `server_side_encryption` or `role_arn`.

    Raises:
        InvalidRequest: something is missing, or is no option.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint: str,
        prefix: str = "",
        access_key_id: str | None = None,
        access_key_secret: str | None = None,
        security_token: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        environment: Environment = SYSTEM,
        **options: str,
    ) -> None:
        _both(access_key_id, access_key_secret, "access_key_secret")
        given = {
            "bucket": bucket,
            "endpoint": endpoint,
            "root": _root(prefix),
            "access_key_id": access_key_id,
            "access_key_secret": access_key_secret,
            "security_token": security_token,
        }
        operator = _operator("oss", given, options, OssConfig.__annotations__.keys(), timeout, retries)
        super().__init__(operator, location=_location("oss", bucket, prefix, endpoint), environment=environment)


def object_store_at(url: str) -> OperatorObjectStore:
    """The store a URL names, `s3://bucket/prefix?endpoint=...&region=...` or `oss://bucket/prefix?endpoint=...`.

    Options of the class stand behind the question mark. Credentials do not: they are found in the environment.

    Raises:
        InvalidRequest: it is no such URL, or holds credentials.
    """
    parts = urlsplit(url)
    options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme not in ("s3", "oss") or not parts.netloc:
        raise InvalidRequest("an object store is written s3://bucket/prefix or oss://bucket/prefix", path="objects")
    if "@" in parts.netloc or any("key" in name or "token" in name for name in options):
        raise InvalidRequest("credentials stand in the environment, and not in a URL", path="objects")
    for name in ("timeout", "retries", "environment", "bucket", "prefix"):
        if name in options:
            raise InvalidRequest(f"{name} does not stand behind the question mark of an object store", path="objects")
    if parts.scheme == "s3":
        return S3ObjectStore(bucket=parts.netloc, prefix=parts.path, **options)
    if "endpoint" not in options:
        raise InvalidRequest("an OSS object store needs ?endpoint=", path="objects")
    return OssObjectStore(bucket=parts.netloc, prefix=parts.path, **options)


def _both(identity: str | None, secret: str | None, name: str) -> None:
    if (identity is None) != (secret is None):
        raise InvalidRequest(f"access_key_id and {name} belong together: give both, or neither", path=name)


def _root(prefix: str) -> str:
    folders = prefix.strip("/").split("/")
    if prefix.strip("/") and any(folder in ("", ".", "..") for folder in folders):
        raise InvalidRequest(f"{prefix!r} is no folder of a bucket", path="prefix")
    return "/" + "/".join(folders)


def _location(scheme: str, bucket: str, prefix: str, endpoint: str | None) -> str:
    """Without user and password, if the endpoint has any."""
    place = "/".join(filter(None, (bucket, prefix.strip("/"))))
    host = "" if endpoint is None else urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").netloc
    return f"{scheme}://{place}" + (f" of {host.rpartition('@')[2]}" if host else "")


def _operator(
    scheme: str,
    given: dict[str, str | None],
    options: dict[str, str],
    known: Collection[str],
    timeout: float,
    retries: int,
) -> opendal.Operator:
    for name in options:
        if name not in known or name == "root":
            raise InvalidRequest(f"{name!r} is no option of an {scheme.upper()} object store", path=name)
    if not timeout > 0:
        raise InvalidRequest("a time-out is more than 0 seconds", path="timeout")
    if retries < 0:
        raise InvalidRequest("a number of retries is 0 or more", path="retries")
    settings = {name: value for name, value in given.items() if value is not None} | options
    try:
        operator = opendal.Operator(scheme, **settings)
    except _ERRORS as error:
        # Its text names the option that is missing, and holds none of their values.
        reason = str(error).partition("\n")[0].rpartition("=> ")[2]
        raise InvalidRequest(f"the {scheme.upper()} object store cannot be set up: {reason}") from None
    first, longest = RETRY_SECONDS
    return operator.layer(layers.TimeoutLayer(timeout=timeout, io_timeout=timeout)).layer(
        layers.RetryLayer(max_times=retries, min_delay=first, max_delay=longest, jitter=True)
    )
