"""Clients of object stores, one of which a test has `s3://` read by."""

from datetime import timedelta
from importlib.util import find_spec

import pytest

from bigload.checkpoint import byte_source
from bigload.checkpoint.sources import fsspec_files, object_stores

CLIENTS = [
    pytest.param(
        name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install {name}")
    )
    for name in ("obstore", "s3fs")
]
PAUSES = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2}


def use_client(name, monkeypatch):
    """Have `s3://` read by the client of this name, with pauses too short to notice."""
    monkeypatch.setattr(object_stores, "RETRY", {**object_stores.RETRY, "max_retries": 3, "backoff": PAUSES})
    object_stores._store.cache_clear()
    schemes = {scheme.name: scheme for scheme in object_stores.SCHEMES}
    if name == "s3fs":
        import s3fs

        schemes["s3"] = fsspec_files.scheme_named("s3")
        s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(byte_source, "_SCHEMES", {"file": byte_source._FILE, **schemes})
