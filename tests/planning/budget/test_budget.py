import pytest

from bigload.devices import CPU, DISK, Device
from bigload.errors import OptionError
from bigload.planning.budget.budget import MemoryBudget

GIB = 1024**3
CUDA0, CUDA1 = Device("cuda", 0), Device("cuda", 1)


def limits(budget):
    return {str(device): limit for device, limit in budget}


def test_a_budget_reads_names_numbers_and_sizes():
    budget = MemoryBudget.of({0: "22GiB", "cuda:1": 5, "cpu": "64 GiB"})
    assert limits(budget) == {"cuda:0": 22 * GIB, "cuda:1": 5, "cpu": 64 * GIB, "disk": None}


def test_accelerators_keep_their_order_and_cpu_and_disk_come_last():
    budget = MemoryBudget.of({"disk": 1, "cpu": 2, "cuda:1": 3, "cuda:0": 4})
    assert [str(device) for device, _ in budget] == ["cuda:1", "cuda:0", "cpu", "disk"]
    assert budget.accelerators == (CUDA1, CUDA0)


def test_the_disk_takes_what_is_left_unless_it_is_forbidden():
    assert MemoryBudget.of({"cpu": 1}).has_disk
    assert not MemoryBudget.of({"cpu": 1}, use_disk=False).has_disk


def test_the_disk_may_have_a_limit():
    assert MemoryBudget.of({"cpu": 1, "disk": "1GiB"}).get(DISK) == GIB


def test_a_device_that_is_not_named_gets_nothing():
    budget = MemoryBudget.of({"cuda:0": 1}, use_disk=False)
    assert (budget.get(CPU), budget.get(DISK), budget.has_cpu) == (0, 0, False)


def test_an_unbounded_disk_has_no_limit():
    assert MemoryBudget.of({"cpu": 1}).get(DISK) is None


@pytest.mark.parametrize(
    "words",
    [
        ["cuda:0=22GiB", "cpu=64GiB"],
        ["cuda:0=22GiB,cpu=64GiB"],
        [" 0 = 22GiB , cpu = 64GiB "],
        ["cuda=22GiB", "CPU=64gib"],
    ],
)
def test_words_of_the_command_line_are_read_one_by_one_or_with_commas(words):
    assert limits(MemoryBudget.parse(words)) == {"cuda:0": 22 * GIB, "cpu": 64 * GIB, "disk": None}


@pytest.mark.parametrize("word", ["", "cpu", "cpu=", "cpu= ", "cpu=1GiB,", ",", "cpu:1GiB"])
def test_a_word_that_is_no_limit_is_refused(word):
    with pytest.raises(OptionError, match="is not a memory limit"):
        MemoryBudget.parse([word])


@pytest.mark.parametrize("size", ["22Gb", "22G", "22g", "many", "-1GiB", "1e9", "", None, True, 1.5j])
def test_a_size_that_cannot_be_read_is_refused(size):
    with pytest.raises(OptionError, match="cuda:0"):
        MemoryBudget.of({"cuda:0": size})


@pytest.mark.parametrize(("size", "reason"), [(-1, "at least 0 bytes"), ("0.5", "less than one byte")])
def test_a_limit_below_nothing_or_one_byte_is_refused(size, reason):
    with pytest.raises(OptionError, match=reason) as raised:
        MemoryBudget.of({"cuda:0": size})
    assert raised.value.message.count("--max-memory") == 1
    assert raised.value.hint == "cuda:0=0 gives it nothing"


@pytest.mark.parametrize("nothing", [0, "0", "0GiB", "0%", "0.0"])
@pytest.mark.parametrize("device", ["cuda:0", "cpu", "disk"])
def test_a_device_with_a_limit_of_nothing_gets_nothing(device, nothing):
    """As with accelerate, whose `max_memory` says `{0: 0, "cpu": ...}` for a device that is not to be used."""
    budget = MemoryBudget.of({"cuda:0": 1, "cpu": 1, device: nothing})
    whole = {"cuda:0": 1, "cpu": 1, "disk": None}
    assert limits(budget) == {name: limit for name, limit in whole.items() if name != device}
    assert limits(MemoryBudget.of({"cuda:1": 1, "disk": nothing}, use_disk=False)) == {"cuda:1": 1}


def test_nothing_on_every_device_that_computes_is_refused():
    with pytest.raises(OptionError, match="no device that computes"):
        MemoryBudget.of({"cuda:0": 0, "cpu": "0%", "disk": 5})


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", -1, "cpu:0", None, ("cuda", 0)])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(OptionError, match="unknown device"):
        MemoryBudget.of({device: "1GiB"})


@pytest.mark.parametrize("words", [["cpu=1GiB", "cpu=2GiB"], ["cuda=1GiB,0=1GiB"], ["cuda:0=1GiB", "cuda:00=1GiB"]])
def test_a_device_that_is_named_twice_is_refused(words):
    with pytest.raises(OptionError, match="two limits"):
        MemoryBudget.parse(words)


@pytest.mark.parametrize("max_memory", [{}, {"disk": "1GiB"}])
def test_a_budget_without_a_device_that_computes_is_refused(max_memory):
    with pytest.raises(OptionError, match="no device that computes"):
        MemoryBudget.of(max_memory)


def test_a_limit_for_a_forbidden_disk_is_refused():
    with pytest.raises(OptionError, match="forbidden"):
        MemoryBudget.of({"cpu": 1, "disk": 1}, use_disk=False)


def test_the_argument_is_left_as_it_was():
    max_memory = {"cuda:0": "1GiB"}
    MemoryBudget.of(max_memory)
    assert max_memory == {"cuda:0": "1GiB"}


def test_a_size_beyond_all_measure_is_refused():
    with pytest.raises(OptionError):
        MemoryBudget.of({"cpu": "9" * 400 + "G"})


@pytest.mark.parametrize("max_memory", [{"cpu": 10**5000}, {"cpu": -(10**5000)}, {10**5000: 1}, {"9" * 5000: 1}])
def test_numbers_that_python_will_not_write_are_refused_in_words(max_memory):
    with pytest.raises(OptionError) as refused:
        MemoryBudget.of(max_memory)
    assert len(str(refused.value)) < 300


def test_two_limits_are_shown_side_by_side():
    with pytest.raises(OptionError) as refused:
        MemoryBudget.parse(["cpu=1GiB,cuda:0=1GiB", "cuda=5GB"])
    assert refused.value.details == ("--max-memory cuda:0=1GiB", "--max-memory cuda=5GB")
