"""Object stores as a source names them: S3, Google Cloud Storage, Azure and HTTP servers, all through obstore.

    Bucket          where objects lie and how it is reached; small, sent to other processes, and the key of clients
    RemoteObject    one object as its listing saw it: what is fetched later must be this version

A client belongs to one process and is made anew when the store refuses its credentials: those of the environment, of
files and of the instance are then read again.
"""

from __future__ import annotations

import configparser
import datetime
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyarrow import fs

from overlord.errors import SpecError
from overlord.storage import GCS_OPTIONS, S3_OPTIONS, StorageOptions, check_options

OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "http", "https")
"""The schemes of URLs that are read through obstore."""
_CREDENTIALS_S = 300
"""How long credentials of a file are used before the file is read again."""
REQUEST_S = 20.0
"""Seconds that a request may take where `request_timeout` says nothing; one for many bytes has longer for them."""
_S3_OPTIONS = {
    name: kind for name, kind in S3_OPTIONS.items() if name not in ("allow_bucket_creation", "allow_delayed_open")
}
_GCS_OPTIONS = {name: kind for name, kind in GCS_OPTIONS.items() if name != "project_id"}
"""As those of stores, without what acts on writing only."""
_AZURE_OPTIONS: dict[str, type] = {
    "account_name": str,
    "account_key": str,
    "sas_token": str,
    "tenant_id": str,
    "client_id": str,
    "client_secret": str,
    "anonymous": bool,
    "endpoint_override": str,
}
_HTTP_OPTIONS: dict[str, type] = {
    "token": str,
    "request_timeout": float,
    "connect_timeout": float,
    "proxy_options": str,
    "tls_ca_file_path": str,
}


def checked_options(scheme: str, options: StorageOptions) -> tuple[str, dict[str, Any]]:
    """Return the scheme that stands for all of its store, and the options.

    Raises:
        SpecError: A storage option is unknown, or of another type.
    """
    scheme = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    allowed = {"s3": _S3_OPTIONS, "gs": _GCS_OPTIONS, "az": _AZURE_OPTIONS}.get(scheme, _HTTP_OPTIONS)
    return scheme, check_options(scheme, options, allowed)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, a container or an HTTP server, and how it is reached.

    Example:
        >>> Bucket.of("s3", "data", {"endpoint_override": "http://minio:9000"}).identity
        's3://data at http://minio:9000'
    """

    scheme: str
    """One of s3, gs, az, http and https."""
    name: str
    options: tuple[tuple[str, Any], ...] = field(repr=False)

    @classmethod
    def of(cls, scheme: str, name: str, options: StorageOptions) -> Bucket:
        """Return the bucket that a URL of a source names.

        Raises:
            SpecError: A storage option is unknown, or of another type.
        """
        scheme, chosen = checked_options(scheme, options)
        if scheme == "s3" and not any(name in chosen for name in ("region", "endpoint_override")):
            chosen |= _region_of(name)
        return cls(scheme, name, tuple(sorted(chosen.items())))

    @property
    def identity(self) -> str:
        """What tells it from all others, without credentials."""
        options = dict(self.options)
        place = options.get("endpoint_override") or options.get("account_name")
        return f"{self.scheme}://{self.name}" + (f" at {place}" if place else "")

    @property
    def request_s(self) -> float:
        """Seconds that a request may take, apart from those for its bytes."""
        return float(dict(self.options).get("request_timeout", REQUEST_S))

    @property
    def retry_s(self) -> float | None:
        """Seconds within which a request is repeated; None where only its attempts are counted."""
        seconds = dict(self.options).get("retry_time_limit")
        return None if seconds is None else float(seconds)

    def connect(self, bytes_s: float = 0.0) -> Any:
        """Return a new client, whose credentials are looked up again.

        Args:
            bytes_s: Seconds that the bytes of a response may take in addition to `request_s`.

        Raises:
            SpecError: A package is needed that is not installed.
            OSError: The options fit no client.
        """
        from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

        options = dict(self.options)
        # One attempt only: requests are tried again by the fetcher, which counts them.
        retries = {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=1)}
        common: dict[str, Any] = {
            "client_options": _client_options(options, self.request_s + bytes_s),
            "retry_config": retries,
        }
        try:
            if self.scheme == "s3":
                return S3Store(self.name, **_s3_options(self.name, options), **common)
            if self.scheme == "gs":
                return GCSStore(self.name, **_gcs_options(options), **common)
            if self.scheme == "az":
                return AzureStore(self.name, **_azure_options(options), **common)
            return HTTPStore(f"{self.scheme}://{self.name}/", **common)
        except SpecError:
            raise
        except Exception as error:  # obstore has an exception for every store, and none in common for options
            raise OSError(str(error).partition("\n")[0]) from error


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object as its listing saw it."""

    bucket: Bucket
    key: str
    size: int
    mtime_ns: int
    etag: str | None
    """None where the store has none, and the version is part of the key or only the time tells it."""
    url: str
    """For messages."""
    immutable: bool = False
    """Whether the key names one version for ever, as a commit does."""

    @property
    def version(self) -> tuple[object, ...]:
        """What tells this version of the object from all other objects and versions."""
        return (self.bucket.identity, self.key, self.size, self.etag or self.mtime_ns)

    @property
    def condition(self) -> str | None:
        """The ETag that a request may name; a weak one would never match."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    def is_in(self, meta: Mapping[str, Any]) -> str | None:
        """Return None if what a response says of its object is this version, else how they differ."""
        if meta["size"] != self.size:
            return f"has {meta['size']} bytes where the listing found {self.size}"
        if self.immutable:
            return None
        if self.etag is not None and meta["e_tag"] is not None:
            return None if meta["e_tag"] == self.etag else "was written to after it was listed"
        # A listing may tell fractions of a second, a response never does.
        moved = self.mtime_ns and mtime_ns_of(meta) // 10**9 != self.mtime_ns // 10**9
        return "was written to after it was listed" if moved else None


def mtime_ns_of(meta: Mapping[str, Any]) -> int:
    """Return when an object was last written, as far as the store says; 0 where it does not."""
    written: datetime.datetime | None = meta["last_modified"]
    return 0 if written is None else round(written.timestamp() * 1000) * 10**6


def http_key(path: str) -> str:
    """Return the key of a path of an HTTP server.

    Raises:
        SpecError: It has a query, which no request could carry.
    """
    if "?" in path or "#" in path:
        raise SpecError(
            f"the URL {quote(path.partition('?')[0])!r} has a query; objects of HTTP servers are named by their path "
            "alone. Give the store's own URL (s3://, gs://, az://) and credentials, or a token in storage_options."
        )
    return path


def _client_options(options: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "allow_http": True,  # where an endpoint says http://, that is meant
        "timeout": datetime.timedelta(seconds=timeout_s),  # of one request: a listing makes one for each page
        "connect_timeout": datetime.timedelta(seconds=options.get("connect_timeout", 5)),
    }
    if "proxy_options" in options:
        chosen["proxy_url"] = options["proxy_options"]
    if "tls_ca_file_path" in options:
        chosen["root_certificate"] = Path(options["tls_ca_file_path"]).read_bytes()
    if "token" in options:
        chosen["default_headers"] = {"authorization": f"Bearer {options['token']}"}
    return chosen


def _s3_options(bucket: str, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"region": options.get("region", "us-east-1")}
    endpoint = options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL"
    )  # fmt: skip
    virtual = bool(options.get("force_virtual_addressing", not endpoint and "." not in bucket))
    chosen["virtual_hosted_style_request"] = virtual
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        scheme = options.get("scheme") or scheme or "https"
        chosen["endpoint"] = f"{scheme}://{bucket}.{host}" if virtual else f"{scheme}://{host.rstrip('/')}"
    if options.get("anonymous"):
        return chosen | {"skip_signature": True}
    keys = {"access_key_id": "access_key", "secret_access_key": "secret_key", "session_token": "session_token"}
    chosen |= {theirs: options[ours] for theirs, ours in keys.items() if ours in options}
    if "role_arn" in options:
        return {name: value for name, value in chosen.items() if name not in keys} | _assumed_role(options)
    return chosen if "access_key" in options else chosen | _profile()


def _assumed_role(options: Mapping[str, Any]) -> dict[str, Any]:
    session, provider = _boto3("role_arn of the storage options needs")
    keys = {"aws_access_key_id": "access_key", "aws_secret_access_key": "secret_key",
            "aws_session_token": "session_token"}  # fmt: skip
    chosen = {theirs: options[ours] for theirs, ours in keys.items() if ours in options}
    role: dict[str, Any] = {
        "RoleArn": options["role_arn"],
        "RoleSessionName": options.get("session_name") or "overlord",
        "DurationSeconds": options.get("load_frequency") or 900,
    }
    if "external_id" in options:
        role["ExternalId"] = options["external_id"]
    return {"credential_provider": provider(session(**chosen), **role)}


def _boto3(needed: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import boto3  # type: ignore[import-untyped, unused-ignore]
        from obstore.auth.boto3 import StsCredentialProvider
    except ImportError as error:
        raise SpecError(
            f"{needed} the package boto3, which is not installed; no object can be read. Install boto3, or give "
            "credentials by environment variables, a credentials file or an instance role."
        ) from error
    return boto3.Session, StsCredentialProvider


_ELSEWHERE = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
"""Variables that say where credentials come from; obstore looks there itself, and asks the instance in the end."""


def _profile() -> dict[str, Any]:
    """Return how credentials of the user's AWS files are had; nothing where they come from somewhere else."""
    if any(os.environ.get(name) for name in _ELSEWHERE):
        return {}
    name = os.environ.get("AWS_PROFILE") or "default"
    if _keys_of(name) is not None:
        return {"credential_provider": _ProfileKeys(name)}
    section = _aws_file("AWS_CONFIG_FILE", "config")
    title = name if name == "default" else f"profile {name}"
    if not section.has_section(title) or not any(
        key in section[title] for key in ("sso_session", "sso_start_url", "role_arn", "credential_process")
    ):
        return {}
    _boto3(f"the AWS profile {name!r} needs")
    from obstore.auth.boto3 import Boto3CredentialProvider

    return {"credential_provider": Boto3CredentialProvider()}


class _ProfileKeys:
    """Reads the keys of a profile from the credentials file, again and again: they may be replaced in a long run."""

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def __call__(self) -> dict[str, Any]:
        keys = _keys_of(self._profile)
        if keys is None:
            raise OSError(f"the AWS profile {self._profile!r} has no keys any more")
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=_CREDENTIALS_S)
        return {**keys, "expires_at": until}


def _keys_of(profile: str) -> dict[str, Any] | None:
    section = _aws_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    if not section.has_option(profile, "aws_access_key_id"):
        return None
    return {
        "access_key_id": section[profile]["aws_access_key_id"],
        "secret_access_key": section[profile].get("aws_secret_access_key", ""),
        "token": section[profile].get("aws_session_token") or None,
    }


def _aws_file(variable: str, name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    path = Path(os.environ.get(variable) or f"~/.aws/{name}").expanduser()
    try:
        parser.read_string(path.read_text())
    except (OSError, configparser.Error, UnicodeDecodeError):
        pass  # there is none, or none that can be read: as for the AWS tools, it then says nothing
    return parser


@functools.lru_cache(maxsize=256)
def _region_of(bucket: str) -> dict[str, str]:
    """Return the region that a bucket is in, where the environment names neither a region nor another server."""
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        return {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        return {"region": region}
    try:
        return {"region": fs.resolve_s3_region(bucket)}
    except OSError:
        return {}  # no such bucket, or no network: the first request says which


def _gcs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if "endpoint_override" in options:
        endpoint = options["endpoint_override"]
        chosen["base_url"] = endpoint if "://" in endpoint else f"{options.get('scheme', 'https')}://{endpoint}"
    if options.get("anonymous"):
        chosen["skip_signature"] = True
    if "target_service_account" in options:
        chosen["credential_provider"] = _impersonated(options["target_service_account"])
    return chosen


def _impersonated(account: str) -> Any:
    try:
        import google.auth  # type: ignore[import-untyped, unused-ignore]
        from google.auth import impersonated_credentials  # type: ignore[import-untyped, unused-ignore]
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError as error:
        raise SpecError(
            "target_service_account of the storage options needs the package google-auth, which is not installed; no "
            "object is read. Install google-auth and requests, or set GOOGLE_APPLICATION_CREDENTIALS to a key file."
        ) from error
    scope = "https://www.googleapis.com/auth/devstorage.read_only"
    own, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    return GoogleCredentialProvider(
        credentials=impersonated_credentials.Credentials(own, target_principal=account, target_scopes=[scope])
    )


def _azure_options(options: Mapping[str, Any]) -> dict[str, Any]:
    names = {"account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key",
             "tenant_id": "tenant_id", "client_id": "client_id", "client_secret": "client_secret",
             "endpoint_override": "endpoint"}  # fmt: skip
    chosen = {theirs: options[ours] for ours, theirs in names.items() if ours in options}
    return chosen | ({"skip_signature": True} if options.get("anonymous") else {})
