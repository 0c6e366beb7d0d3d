"""Advice in errors of object stores, whichever client reads them: credentials, addresses and regions."""

from __future__ import annotations

import os

STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The service of each scheme."""

_MISSING = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles need boto3: pip install boto3), "
    "or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_KEYS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def credentials_hint(scheme: str) -> str:
    """Return how to give the client of a store credentials."""
    return _MISSING[STORES[scheme]]


def refusal_hint(scheme: str) -> str:
    """Return what to do where a store refuses a request: other rights where credentials are set, or credentials."""
    found = [name for name in _KEYS[STORES[scheme]] if os.environ.get(name)]
    if not found:
        return credentials_hint(scheme)
    return f"check {', '.join(found)}; the user needs the rights to list the bucket and to read its objects"


def connection_hint(scheme: str) -> str | None:
    """Return what to look at where a store cannot be reached: the variable that has its address, if one is set."""
    found = next((name for name in _ENDPOINTS[STORES[scheme]] if os.environ.get(name)), None)
    return None if found is None else f"check the address in {found}"
