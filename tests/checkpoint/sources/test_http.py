"""Range reads over HTTP: what a server may do wrong, and that bytes are right or an error is raised."""

import random
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.source import open_checkpoint
from bigload.checkpoint.sources.http import url_of
from bigload.checkpoint.sources.http_requests import RateLimitWarning
from bigload.checkpoint.sources.ranged_source import MAX_FRUITLESS_TRIES
from bigload.checkpoint.sources.small_reads import opened_range
from bigload.errors import AccessDeniedError, CheckpointError, CheckpointNotFoundError, ReadError
from bigload.loading.load import load
from bigload.machine.threads.activities import NO_RECORDER, Phase, Recorder
from builders import make_checkpoint

CONTENT = random.Random(7).randbytes(300_000)


@pytest.fixture
def location(served, tmp_path):
    """A file of 300,000 bytes on a plain server."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.bin").write_bytes(CONTENT)
    return Path(served.serve("files", tmp_path / "files")) / "a.bin"


END = len(CONTENT)


def read(location, start=0, stop=END, *, sizes=None):
    source = scheme_of(location).open(location, NO_RECORDER)
    buffers = [bytearray(size) for size in sizes or [stop - start]]
    source.read_into([memoryview(buffer) for buffer in buffers], start)
    source.close()
    return b"".join(buffers)


def test_buffers_are_filled_from_the_offset_on_by_one_request(served, location):
    assert read(location, 1000, sizes=[1, 0, 70_000, 5]) == CONTENT[1000:71_006]
    assert [request.headers["range"] for request in served.requests] == ["bytes=1000-71005"]
    assert served.requests[0].headers["accept-encoding"] == "identity"


def test_nothing_to_read_sends_nothing(served, location):
    assert not read(location, 5, 5)
    assert not served.requests


def test_threads_read_one_source_at_once(served, location):
    source, found = scheme_of(location).open(location, NO_RECORDER), {}

    def part(index):
        buffer = bytearray(1000)
        source.read_into([memoryview(buffer)], 1000 * index)
        found[index] = bytes(buffer)

    threads = [threading.Thread(target=part, args=(index,)) for index in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[index] == CONTENT[1000 * index : 1000 * index + 1000] for index in range(40))


def test_a_body_that_is_cut_off_is_continued_where_it_stopped(served, location, clock):
    served.fault("plain", cut_after=100_000, times=2)
    assert read(location) == CONTENT
    starts = [int(request.headers["range"].removeprefix("bytes=").partition("-")[0]) for request in served.requests]
    assert len(starts) == 3
    assert sorted(starts) == starts
    assert served.num_bytes == len(CONTENT)  # nothing is transferred twice
    assert not clock.slept  # there was progress


def test_only_tries_that_bring_nothing_count(served, location):
    served.fault("plain", cut_after=30_000, times=9)
    assert read(location) == CONTENT


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_temporary_failures_are_tried_again_with_growing_pauses(served, location, clock, status):
    served.fault("plain", status=status, times=MAX_FRUITLESS_TRIES - 1)
    assert read(location) == CONTENT
    assert clock.slept == [0.5, 1, 2, 4]


def test_failures_that_last_are_an_error_that_says_how_often(served, location):
    served.fault("plain", status=503, times=-1)
    with pytest.raises(ReadError, match=r"a\.bin: the server answered 503, 5 times in a row"):
        read(location)
    assert len(served.requests) == MAX_FRUITLESS_TRIES


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_refusals_are_raised_at_once(served, location, status):
    served.fault("plain", status=status, times=-1)
    expected = AccessDeniedError if status in (401, 403) else ReadError
    with pytest.raises(expected, match=str(status)) as caught:
        read(location)
    assert len(served.requests) == 1
    assert isinstance(caught.value.__cause__, FileNotFoundError) == (status in (404, 410))


@pytest.mark.parametrize("headers", [{"RateLimit": '"resolvers";r=0;t=54'}, {"Retry-After": "55"}])
def test_a_rate_limit_pauses_all_threads_as_long_as_the_server_asks(served, location, clock, headers):
    served.fault("plain", status=429, headers=headers, times=1)
    with pytest.warns(RateLimitWarning, match="limits the rate of requests; waiting 55 s"):
        assert read(location) == CONTENT
    assert clock.now == pytest.approx(55)


def test_rate_limits_that_state_a_time_are_waited_for_however_many(served, location, clock):
    served.fault("plain", status=429, headers={"Retry-After": "10"}, times=2 * MAX_FRUITLESS_TRIES)
    with pytest.warns(RateLimitWarning):
        assert read(location) == CONTENT
    assert clock.now == pytest.approx(20 * MAX_FRUITLESS_TRIES)


def test_the_last_tenth_of_a_quota_is_spread_over_its_time_for_all_threads(served, location, clock):
    policy = {"RateLimit-Policy": '"fixed window";"resolvers";q=3000;w=300'}
    served.fault("plain", headers={"RateLimit": '"resolvers";r=300;t=100', **policy})
    served.fault("plain", headers={"RateLimit": '"resolvers";r=200;t=100', **policy})
    read(location, 0, 10)
    with pytest.warns(RateLimitWarning, match="takes 200 more requests in the next 100 s; they are sent evenly"):
        read(location, 0, 10)
    assert not clock.slept  # the first of them at once
    began = clock.now
    threads = [threading.Thread(target=read, args=(location, 0, 10)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now - began >= 2  # each half a second after the one before
    clock.now, clock.slept = began + 100, []  # the quota is renewed
    for _ in range(3):
        read(location, 0, 10)
    assert not clock.slept


def test_a_low_quota_of_the_api_does_not_slow_down_files(served, location, clock):
    policy = {"RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
    served.fault("plain", headers={"RateLimit": '"api";r=1;t=100', **policy}, times=-1)
    for _ in range(3):
        read(location, 0, 10)
    assert not clock.slept


def test_a_certificate_that_nobody_signed_is_an_error_that_names_the_variable_to_set(served):
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).with_name("self_signed.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"127.0.0.1:{server.server_address[1]}"
    with pytest.raises(ReadError, match=f"{address}: its certificate is not trusted") as caught:
        read(Path(f"https:/{address}/a.bin"))
    assert "SSL_CERT_FILE" in caught.value.hint
    server.shutdown()
    server.server_close()


def test_a_shard_of_another_version_with_the_same_header_is_an_error(served, tmp_path):
    folder = make_checkpoint(tmp_path / "files", shards=2)
    checkpoint = open_checkpoint(served.serve("files", folder))
    path = folder / checkpoint.shards[0].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ReadError, match=r"it changed since the checkpoint was opened: .*ETag"):
        load(checkpoint)


@pytest.mark.parametrize("answered", ["bytes 6-10/300000", "bytes 5-10/300000", "bytes 5-9", "none"])
def test_another_range_than_was_asked_for_is_an_error(served, location, answered):
    served.fault("plain", headers={"Content-Range": answered})
    with pytest.raises(ReadError, match="asked for bytes 5-9, the server answers 206 with"):
        read(location, 5, 10)


def test_a_body_that_is_encoded_is_an_error(served, location):
    served.fault("plain", gzip=True)
    with pytest.raises(ReadError, match="encoded as gzip, expected plain bytes"):
        read(location)


def test_a_range_past_the_end_says_where_the_file_ends(served, location):
    with pytest.raises(ReadError, match="the file ended at byte 300000, 10 bytes too early"):
        read(location, len(CONTENT), len(CONTENT) + 10)
    with pytest.raises(ReadError, match="the file ended at byte 300000, 7 bytes too early"):
        read(location, len(CONTENT) - 3, len(CONTENT) + 7)


def test_a_file_that_is_replaced_while_it_is_read_is_never_a_mixture(served, location, tmp_path):
    def replace():
        (tmp_path / "files/a.bin").write_bytes(bytes(len(CONTENT)))

    served.fault("plain", cut_after=100_000, pause=replace)
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened: ETag"):
        read(location)


def test_a_server_that_cannot_be_reached_is_an_error_with_the_reason(clock, location):
    gone = Path("http://127.0.0.1:9/a.bin")
    with pytest.raises(
        ReadError, match=r"the connection to 127\.0\.0\.1:\d+ failed: Connection refused, 5 times in a row"
    ):
        read(gone)


def test_reads_are_told_to_the_recorder(location):
    recorder = Recorder(is_tracing=True)
    source = scheme_of(location).open(location, recorder)
    source.read_into([memoryview(bytearray(10))], 0)
    (activity,) = recorder.activities()
    assert (activity.phase, activity.num_bytes, activity.file) == (Phase.READ, 10, "a.bin")


def test_identity_is_size_and_etag(served, location, tmp_path):
    before = scheme_of(location).identity(location)
    assert (before.num_bytes, served.num_bytes) == (len(CONTENT), 1)
    (tmp_path / "files/a.bin").write_bytes(CONTENT + b"x")
    assert scheme_of(location).identity(location) != before
    (tmp_path / "files/a.bin").write_bytes(b"")
    assert scheme_of(location).identity(location).num_bytes == 0


def test_small_reads_fetch_the_beginning_once_and_what_it_lacks(served, location):
    with opened_range(location, guess=1000) as read_range:
        served.requests.clear()
        assert read_range(0, 8) == CONTENT[:8]
        assert read_range(8, 900) == CONTENT[8:900]
        assert read_range(8, 2000) == CONTENT[8:2000]
        assert read_range(299_000, 300_000) == CONTENT[299_000:]
    ranges = [request.headers["range"] for request in served.requests]
    assert ranges == ["bytes=0-999", "bytes=1000-1999", "bytes=299000-299999"]


def test_a_folder_of_a_web_server_opens_by_known_names(served, tmp_path):
    source = make_checkpoint(tmp_path / "source", shards=3)
    address = served.serve("tiny", source)
    opened = open_checkpoint(address)
    assert (opened.path, opened.tensors) == (address, open_checkpoint(source).tensors)
    part = open_checkpoint(f"{address}/model-00001-of-00003.safetensors")
    assert part.tensors.items() < opened.tensors.items()


def test_a_folder_without_a_checkpoint_names_what_was_looked_for(served, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"none of model\.safetensors\.index\.json, model\.safetensors"):
        open_checkpoint(served.serve("empty", tmp_path / "empty"))


def test_a_config_that_cannot_be_fetched_is_an_error_and_not_a_checkpoint_without_one(served, tmp_path):
    address = served.serve("tiny", make_checkpoint(tmp_path / "source"))
    served.fault("plain", file="config.json", status=500, times=-1)
    with pytest.raises(CheckpointError, match=r"config\.json: the server answered 500"):
        open_checkpoint(address)


@pytest.mark.parametrize("address", ["https://host/x/model.safetensors?token=abc", "https://me:abc@host/x"])
def test_an_address_with_a_secret_is_refused_without_naming_it(address):
    with pytest.raises(CheckpointNotFoundError, match="a query or a user") as caught:
        open_checkpoint(address)
    assert "abc" not in str(caught.value)


def test_names_are_quoted_in_addresses():
    assert url_of(Path("https://host/a b/ü[1].bin")) == "https://host/a%20b/%C3%BC[1].bin"
