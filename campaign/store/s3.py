"""Objects in a bucket of S3 or of a server that speaks its protocol.

Credentials are those of boto3's ordinary chain (on a node: the node's own identity); none is read, stored or sent
by us. Every put is conditional on the key being free, and carries the hash of its bytes; so a put whose answer was
lost is simply made again.
"""

from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from campaign.errors import StoreError, StoreUnreachable
from campaign.store.objects import Address, checked, digest, taken

TRIES = 4
CONNECT_S, READ_S = 5.0, 30.0
PAGE = 1000
_HASH = "sha256"
_PASSING = frozenset(
    {
        "ConditionalRequestConflict",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
    }
)
"""Refusals after which asking again may help."""


class S3Objects:
    """Implements `ObjectStore` over one prefix of one bucket."""

    def __init__(self, address: Address, where: str, *, tries: int = TRIES, pause_s: float = 0.5) -> None:
        self._address, self._where = address, where
        self._made: Any = None
        self._retry = Retrying(
            retry=retry_if_exception_type(StoreUnreachable),
            stop=stop_after_attempt(tries),
            wait=wait_random_exponential(multiplier=pause_s, max=8.0),
            reraise=True,
        )

    def put(self, key: str, data: bytes) -> None:
        said = {"Body": data, "Metadata": {_HASH: digest(data)}}

        def once() -> None:
            try:
                self._ask("put_object", key, IfNoneMatch="*", **said)
            except _Refused as refused:
                if refused.status != 412:
                    raise refused.error from None
                self._settle(key, data, said)

        self._retry(once)

    def _settle(self, key: str, data: bytes, said: dict[str, Any]) -> None:
        """The key is taken: by these bytes, by others, or by what a cut upload left behind on a lax server."""
        there = self._whole(key)
        if there is None:
            raise StoreUnreachable(f"{key}: taken a moment ago, and not there now")
        body, torn, tag = there
        if not torn and body != data:
            raise taken(f"{self._shown}/{key}")
        if torn:
            # It is not what its own hash says, so nobody's object: exactly this one is replaced.
            try:
                self._ask("put_object", key, IfMatch=tag, **said)
            except _Refused as refused:
                raise StoreUnreachable(str(refused)) from None

    def get(self, key: str) -> bytes | None:
        def once() -> bytes | None:
            there = self._whole(key)
            if there is not None and there[1]:
                # Cut on the way here, or on the way there: then whoever writes it finds out, and writes it again.
                raise StoreUnreachable(f"{self._shown}/{key} is not what was written there")
            return None if there is None else there[0]

        return self._retry(once)

    def has(self, key: str) -> bool:
        return self._retry(lambda: self._head(key))

    def keys(self, prefix: str = "") -> list[str]:
        return self._retry(lambda: self._list(prefix))

    # --- one request each

    def _whole(self, key: str) -> tuple[bytes, bool, str] | None:
        """The bytes, whether they are not what their hash says, and their tag; None where there are none."""
        try:
            answer = self._ask("get_object", key)
            data: bytes = self._body(answer["Body"].read)
        except _Refused as refused:
            if refused.status == 404 and not refused.no_bucket:
                return None
            raise refused.error from None
        if "ETag" not in answer:
            raise StoreUnreachable(f"{self._shown}/{key}: the answer was cut")
        return data, digest(data) != answer.get("Metadata", {}).get(_HASH), answer["ETag"]

    def _head(self, key: str) -> bool:
        try:
            self._ask("head_object", key)
        except _Refused as refused:
            if refused.status == 404:
                return False
            raise refused.error from None
        return True

    def _list(self, prefix: str) -> list[str]:
        start, found = f"{self._where}/", list[str]()
        more: dict[str, str] = {}
        while True:
            try:
                page = self._call("list_objects_v2", Prefix=start + prefix, MaxKeys=PAGE, **more)
            except _Refused as refused:
                raise refused.error from None
            found += [item["Key"].removeprefix(start) for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return sorted(found)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _ask(self, operation: str, key: str, **more: Any) -> Any:
        return self._call(operation, Key=f"{self._where}/{checked(key)}", **more)

    def _call(self, operation: str, **arguments: Any) -> Any:
        """One request. Raises _Refused for an answer that says no, StoreUnreachable for none."""
        return self._body(
            lambda: getattr(self._client(), operation)(Bucket=self._address.bucket, **arguments)
        )

    def _body(self, request: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
        from botocore.parsers import ResponseParserError

        try:
            return request()
        except ClientError as error:
            raise self._refused(error.response) from error
        except NoCredentialsError as error:
            raise StoreError(
                f"{self._shown}: no credential. Fix: give the node an identity that may write there, or set AWS_*"
            ) from error
        except (HTTPClientError, BotoCoreError, ResponseParserError) as error:
            # The last of them: an answer that was cut in its headers, where that reads as a whole one without a body.
            raise StoreUnreachable(f"{self._shown}: {error}") from error

    def _refused(self, response: Any) -> "_Refused | StoreUnreachable":
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = response.get("Error", {})
        code = str(said.get("Code", status))
        words = f"{self._shown}: {code}: {said.get('Message', '')}"
        if (status >= 500 and status != 501) or code in _PASSING:
            return StoreUnreachable(words)
        if code == "NoSuchBucket":
            # A server that has lost its state: what it had is uploaded again once the bucket is there.
            words += f". Fix: create bucket {self._address.bucket}"
            return _Refused(status, StoreUnreachable(words), no_bucket=True)
        return _Refused(status, StoreError(words))

    @property
    def _shown(self) -> str:
        return f"s3://{self._address.bucket}/{self._where}"

    def _client(self) -> Any:
        if self._made is None:
            import boto3
            from botocore.config import Config

            # One layer retries, and it is ours.
            config = Config(
                connect_timeout=CONNECT_S,
                read_timeout=READ_S,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"} if self._address.endpoint else {},
            )
            session = boto3.session.Session(region_name=self._address.region)
            region = session.region_name or "us-east-1"
            self._made = session.client(
                "s3", endpoint_url=self._address.endpoint, region_name=region, config=config
            )
        return self._made


class _Refused(Exception):
    """The server said no."""

    def __init__(self, status: int, error: StoreError, *, no_bucket: bool = False) -> None:
        self.status, self.error, self.no_bucket = status, error, no_bucket
        super().__init__(str(error))
