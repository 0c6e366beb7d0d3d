import pytest

import bigload
from bigload.errors import OptionError


@bigload.on_main_process
def main(x, *, y=1):
    """Add."""
    return x + y


DECORATED = {
    "main": (main, [0]),
    "local main": (bigload.on_local_main_process(main.__wrapped__), [0, 2]),
    "last": (bigload.on_last_process(main.__wrapped__), [3]),
    "second": (bigload.on_process(main.__wrapped__, 1), [1]),
    "second, by name": (bigload.on_process(process_index=1)(main.__wrapped__), [1]),
    "second of each host": (bigload.on_local_process(main.__wrapped__, local_process_index=1), [1, 3]),
    "second of each host, by name": (bigload.on_local_process(local_process_index=1)(main.__wrapped__), [1, 3]),
    "none": (bigload.on_process(main.__wrapped__, 7), []),
}


@pytest.mark.parametrize("name", DECORATED)
def test_a_function_runs_where_it_is_to_and_returns_none_elsewhere(launched_by, name):
    decorated, ranks = DECORATED[name]
    found = []
    for rank in range(4):
        launched_by(WORLD_SIZE=4, RANK=rank, LOCAL_RANK=rank % 2)
        found.append(decorated(2, y=3))
    assert found == [5 if rank in ranks else None for rank in range(4)]


@pytest.mark.parametrize("name", DECORATED)
def test_alone_it_runs_whatever_number_was_asked_for(name):
    assert DECORATED[name][0](2) == 3


def test_methods_can_be_decorated_and_names_are_kept(launched_by):
    class Trainer:
        @bigload.on_process(process_index=1)
        def rank(self):
            """Say something."""
            return self

    launched_by(WORLD_SIZE=4, RANK=1, LOCAL_RANK=1)
    trainer = Trainer()
    assert trainer.rank() is trainer
    assert Trainer.rank.__doc__ == "Say something."
    assert (main.__name__, main.__doc__) == ("main", "Add.")


@pytest.mark.parametrize("number", [None, -1, 1.0, "1", True])
@pytest.mark.parametrize(
    ("decorate", "name"), [(bigload.on_process, "process_index"), (bigload.on_local_process, "local_process_index")]
)
def test_what_is_no_number_of_a_process_is_refused_at_once(decorate, name, number):
    with pytest.raises(OptionError, match=f"^{name} is "):
        decorate(print, **{name: number})
