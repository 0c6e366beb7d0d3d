"""Values cross a socket pair as they are, tensors without a copy in the pickle."""

import pickle
import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.parallel.workers.messages import Message, pack, receive, send, unpack


def crossed(value, **options):
    """Send `value` through a socket pair and return what arrives."""
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=send, args=(here, pack(value, **options)))
        sender.start()
        message = receive(there)
        sender.join()
    return message


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_a_tensor_arrives_with_dtype_shape_and_values(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    found = unpack(crossed(tensor))
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8) if shape else found, tensor.view(torch.uint8) if shape else tensor)


def test_what_arrives_can_be_written_to():
    unpack(crossed(torch.zeros(4))).add_(1)


def test_a_row_travels_as_a_row():
    message = pack(torch.zeros(1000, 1000)[3])
    assert [tensor.nbytes for tensor in message.tensors] == [4000]
    assert len(message.pickled) < 1000


def test_columns_and_conjugates_arrive_as_they_look():
    columns = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(unpack(crossed(columns)), columns)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(unpack(crossed(conjugate)), conjugate)


def test_one_tensor_at_two_places_is_one_again():
    tensor = torch.ones(2)
    one, other = unpack(crossed([tensor, {"again": tensor}]))
    assert one is other["again"]


def test_tensors_that_are_made_while_packing_do_not_take_the_place_of_others():
    class Fresh:
        def __reduce__(self):
            return list, ([torch.full((3,), float(self.number))],)

    values = []
    for number in range(50):
        values.append(Fresh())
        values[-1].number = number
    assert [int(found[0][0]) for found in unpack(crossed(values))] == list(range(50))


def test_parameters_arrive_as_parameters_without_gradients():
    found = unpack(crossed(torch.nn.Parameter(torch.ones(2))))
    assert isinstance(found, torch.nn.Parameter)
    assert not found.requires_grad


def test_a_tensor_with_a_history_arrives_without_it():
    assert not unpack(crossed(torch.ones(2, requires_grad=True) * 2)).requires_grad


def test_tensors_of_the_meta_device_and_sparse_ones_travel_in_their_own_way(monkeypatch):
    # torch keeps sparse tensors that were unpickled, and the next `torch.load` warns about them.
    monkeypatch.setattr(torch._utils, "_sparse_tensors_to_validate", [])
    assert unpack(crossed(torch.empty(3, device="meta"))).device.type == "meta"
    assert torch.equal(unpack(crossed(torch.eye(2).to_sparse())).to_dense(), torch.eye(2))


def test_tensors_go_to_the_device_that_is_asked_for():
    assert unpack(crossed({"x": torch.ones(2)}), device=torch.device("meta"))["x"].device.type == "meta"


@given(
    st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner) | st.tuples(inner))
)
def test_plain_values_arrive_as_they_are(value):
    assert unpack(crossed(value)) == value


def test_a_message_larger_than_the_buffer_of_a_socket_arrives():
    big = torch.arange(3_000_000)
    assert torch.equal(unpack(crossed(big)), big)


def test_what_is_kept_does_not_travel():
    secret = object()
    message = pack([secret, 1], persistent_id=lambda value: 7 if value is secret else None)
    assert unpack(message, persistent_load=lambda number: ("found", number)) == [("found", 7), 1]


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent():
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pack(lambda: None)


def test_the_end_of_the_other_side_is_an_end_of_file():
    here, there = socket.socketpair()
    here.sendall(b"\x01")
    here.close()
    with there, pytest.raises(EOFError, match="gone"):
        receive(there)


def test_a_reader_that_does_not_read_is_a_time_out():
    here, there = socket.socketpair()
    here.settimeout(0.05)
    with here, there, pytest.raises(TimeoutError):
        send(here, pack(torch.zeros(3_000_000)))


def test_a_message_in_a_message_keeps_its_tensors_apart():
    inner = pack([torch.ones(2)])
    found = unpack(crossed({"inner": inner}))["inner"]
    assert isinstance(found, Message)
    assert torch.equal(unpack(found)[0], torch.ones(2))
