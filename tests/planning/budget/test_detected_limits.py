"""Budgets that ask what is free: on machines that were written down, so that the figures are known."""

import decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.devices import CPU, Device
from bigload.errors import OptionError
from bigload.machine.machine import Machine
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory, UnknownMemory
from bigload.planning.budget.budget import MemoryBudget

GIB = 1024**3


def gpu(number, free, total=24 * GIB):
    return DetectedMemory(device=Device("cuda", number), total_bytes=total, free_bytes=free, source="nvidia-smi")


def ram(free, total=64 * GIB):
    return DetectedMemory(device=CPU, total_bytes=total, free_bytes=free, source="MemAvailable")


def unknown(number):
    return UnknownMemory(device=Device("cuda", number), reason="it does not tell")


class Asked:
    """A machine with these figures that remembers what it was asked for."""

    def __init__(self, *gpus, cpu=None, unknown=(), missing="", notes=()):
        self.questions = []
        self.found = DetectedGpus(memory=gpus, unknown=tuple(unknown), missing=missing, notes=tuple(notes))
        self.cpu = cpu

    @property
    def machine(self):
        return Machine(ram=lambda: self.answer("ram", self.cpu), gpus=lambda: self.answer("gpus", self.found))

    def answer(self, question, answer):
        self.questions.append(question)
        return answer

    def parse(self, *words, **options):
        return MemoryBudget.parse(words, machine=self.machine, **options)

    def limits(self, *words):
        return {str(device): limit for device, limit in self.parse(*words, use_disk=False)}

    def refuses(self, *words):
        with pytest.raises(OptionError) as refused:
            self.parse(*words)
        return refused.value


@pytest.fixture
def two_gpus():
    return Asked(gpu(0, 22 * GIB), gpu(1, 10 * GIB), cpu=ram(40 * GIB))


# What is asked for


def test_auto_is_what_is_free_on_every_gpu_and_in_ram(two_gpus):
    assert two_gpus.limits("auto") == {"cuda:0": 22 * GIB, "cuda:1": 10 * GIB, "cpu": 40 * GIB}


def test_the_disk_still_takes_what_is_left(two_gpus):
    assert two_gpus.parse("auto").has_disk
    assert not two_gpus.parse("auto", use_disk=False).has_disk


@pytest.mark.parametrize("word", ["auto", " AUTO ", "auto,auto"])
def test_auto_can_be_said_in_capitals_and_more_than_once(two_gpus, word):
    assert two_gpus.limits(word) == two_gpus.limits("auto")


def test_a_percentage_is_of_what_is_free_not_of_what_there_is(two_gpus):
    assert two_gpus.limits("cuda:1=50%", "cpu=12.5%") == {"cuda:1": 5 * GIB, "cpu": 5 * GIB}


def test_auto_for_one_device_is_all_that_is_free_on_it(two_gpus):
    assert two_gpus.limits("cuda:1=auto") == two_gpus.limits("cuda:1=100%") == {"cuda:1": 10 * GIB}


@pytest.mark.parametrize("spelled", ["90%", " 90 % ", "90.0%", "90.000000%", "090%"])
def test_percentages_are_read_however_they_are_spelled(two_gpus, spelled):
    assert two_gpus.limits(f"cpu={spelled}") == {"cpu": 36 * GIB}


@pytest.mark.parametrize(
    ("words", "questions"),
    [
        ("cuda:0=22GiB,cpu=64GiB", []),
        ("cpu=50%", ["ram"]),
        ("cuda:0=auto,cpu=64GiB", ["gpus"]),
        ("cuda:0=90%,cuda:1=90%,cpu=auto", ["ram", "gpus"]),
        ("auto,cuda:0=50%,auto", ["ram", "gpus"]),
    ],
)
def test_a_machine_is_asked_once_and_only_for_what_is_needed(two_gpus, words, questions):
    two_gpus.parse(words)
    assert two_gpus.questions == questions


def test_the_python_form_reads_the_same_words(two_gpus):
    machine = two_gpus.machine
    assert MemoryBudget.of("auto", machine=machine) == MemoryBudget.parse(["auto"], machine=machine)
    assert MemoryBudget.of("cpu=1GiB,cuda:0=50%", machine=machine) == MemoryBudget.of(
        {"cpu": "1GiB", 0: "50%"}, machine=machine
    )
    assert MemoryBudget.of({"cuda:1": "auto", "cpu": GIB}, machine=machine).get(Device("cuda", 1)) == 10 * GIB


@given(st.integers(1, 2**63 - 1), st.integers(1, 10**8))
def test_a_share_is_exact_to_the_byte_whatever_precision_the_caller_gave_to_decimals(free, millionths):
    machine, word = Asked(cpu=ram(free)), f"cpu={millionths // 10**6}.{millionths % 10**6:06}%"
    share = free * millionths // 10**8
    with decimal.localcontext(decimal.Context(prec=3)):
        if share:
            assert machine.parse(word).get(CPU) == share
        else:
            assert "that is nothing" in str(machine.refuses(word))


# Mixing


@pytest.mark.parametrize("words", [["auto", "cuda:0=5GiB"], ["cuda:0=5GiB", "auto"], ["auto,cuda:0=5GiB,auto"]])
def test_what_names_a_device_goes_before_auto_wherever_it_stands(two_gpus, words):
    assert two_gpus.limits(*words) == {"cuda:0": 5 * GIB, "cuda:1": 10 * GIB, "cpu": 40 * GIB}


def test_auto_keeps_the_order_of_the_machine_unless_a_device_is_named_first(two_gpus):
    assert list(two_gpus.limits("auto", "cuda:0=1GiB")) == ["cuda:0", "cuda:1", "cpu"]
    assert list(two_gpus.limits("cuda:1=1GiB", "auto")) == ["cuda:1", "cuda:0", "cpu"]


def test_a_share_of_a_device_goes_before_auto_too(two_gpus):
    assert two_gpus.limits("auto", "cuda:0=50%")["cuda:0"] == 11 * GIB


def test_a_device_that_is_not_there_can_be_given_a_size_beside_auto(two_gpus):
    assert two_gpus.limits("auto", "cuda:7=1GiB")["cuda:7"] == GIB


@pytest.mark.parametrize("words", ["cpu=1GiB,cpu=auto", "auto,cpu=50%,cpu=60%", "cuda=auto,0=auto"])
def test_a_device_that_is_named_twice_is_refused_also_with_shares(two_gpus, words):
    assert "has two limits" in str(two_gpus.refuses(words))


def test_two_limits_are_refused_before_anything_is_asked(two_gpus):
    two_gpus.refuses("cpu=1GiB,cpu=auto")
    assert two_gpus.questions == []


# What was found


def test_a_budget_says_what_was_found_where_limits_come_from_there(two_gpus):
    budget = two_gpus.parse("cpu=50%", "cuda:0=1GiB", "cuda:1=auto")
    assert budget.detected == (gpu(1, 10 * GIB), ram(40 * GIB))
    assert budget.detection == (
        "found cuda:1 10.00 GiB free of 24.00 GiB (nvidia-smi), cpu 40.00 GiB free of 64.00 GiB (MemAvailable)"
    )


def test_a_budget_of_sizes_found_nothing(two_gpus):
    budget = two_gpus.parse("cpu=1GiB")
    assert (budget.detected, budget.detection, budget.notes) == ((), None, ())


def test_budgets_with_the_same_limits_are_equal_wherever_they_come_from(two_gpus):
    found, given_ = two_gpus.parse("cpu=auto"), MemoryBudget.of({"cpu": 40 * GIB})
    assert found == given_
    assert hash(found) == hash(given_)
    assert found.detected != given_.detected


def test_another_limit_for_a_device_is_no_longer_the_one_that_was_found(two_gpus):
    budget = two_gpus.parse("auto").with_limit(CPU, 5)
    assert [str(memory.device) for memory in budget.detected] == ["cuda:0", "cuda:1"]
    assert budget.get(CPU) == 5


def test_doubts_about_gpus_reach_the_budget(two_gpus):
    doubtful = Asked(gpu(0, GIB), cpu=ram(GIB), notes=["which is which?"])
    assert doubtful.parse("auto").notes == doubtful.parse("cuda:0=50%").notes == ("which is which?",)
    assert doubtful.parse("cpu=50%").notes == ()


# What is not there, or not known


def test_auto_without_gpus_is_the_ram():
    assert Asked(cpu=ram(GIB), missing="none here").limits("auto") == {"cpu": GIB}


def test_auto_without_a_figure_for_ram_is_the_gpus_and_says_so():
    machine = Asked(gpu(0, GIB))
    assert machine.limits("auto") == {"cuda:0": GIB}
    assert "cpu is left out" in machine.parse("auto").notes[0]


def test_auto_that_finds_nothing_is_refused_with_the_reasons():
    refused = Asked(missing="nvidia-smi is not installed").refuses("auto", "disk=5GiB")
    assert "auto finds no memory" in refused.message
    assert refused.details[0] == "nvidia-smi is not installed"
    assert "RAM" in refused.details[1]
    assert "-m cpu=64GiB" in refused.hint


def test_a_gpu_with_nothing_free_is_left_out_and_said():
    machine = Asked(gpu(0, 0), gpu(1, GIB), cpu=ram(GIB))
    assert machine.limits("auto") == {"cuda:1": GIB, "cpu": GIB}
    assert machine.parse("auto").notes == ("cuda:0 is left out: cuda:0 0 B free of 24.00 GiB (nvidia-smi)",)


def test_auto_never_leaves_out_a_gpu_whose_memory_is_not_known():
    refused = Asked(gpu(0, GIB), cpu=ram(GIB), unknown=[unknown(1)]).refuses("auto")
    assert "cuda:1" in refused.message
    assert "it does not tell" in refused.message
    assert "-m cuda:1=SIZE" in refused.hint


def test_a_gpu_whose_memory_is_not_known_can_be_given_a_limit_beside_auto():
    machine = Asked(gpu(0, GIB), cpu=ram(GIB), unknown=[unknown(1)])
    assert machine.limits("auto", "cuda:1=3GiB") == {"cuda:0": GIB, "cuda:1": 3 * GIB, "cpu": GIB}
    assert "it does not tell" in machine.parse("auto", "cuda:1=3GiB").notes[0]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("cuda:0=90%", "it does not tell"),
        ("cuda:2=90%", "there is no cuda:2 here: found cuda:1, cuda:0"),
        ("cpu=auto", "how much RAM is free"),
        ("mps=50%", "how much memory mps has cannot be looked up"),
        ("npu:0=auto", "how much memory npu:0 has cannot be looked up"),
        ("disk=50%", "takes what is left"),
        ("disk=auto", "takes what is left"),
        ("cuda:1=100.1%", "more than all of what is free on cuda:1"),
        ("cuda:1=150%", "more than all"),
        ("cuda:1=-5%", "not a percentage"),
        ("cuda:1=nan%", "not a percentage"),
        ("cuda:1=inf%", "not a percentage"),
        ("cuda:1=%", "not a percentage"),
        ("cuda:1=1e1%", "not a percentage"),
        ("cuda:1=٥%", "not a percentage"),
        ("cuda:1=9.1234567%", "not a percentage"),
        ("cuda:1=50%%", "not a percentage"),
        ("cuda:1=automatic", "not a size"),
        ("auto=5GiB", "unknown device"),
        ("auto:0", "not a memory limit"),
    ],
)
def test_a_share_that_cannot_be_had_is_refused_with_the_reason(word, reason):
    refused = Asked(gpu(1, GIB), unknown=[unknown(0)]).refuses(word, "cuda:5=1GiB")
    assert word.partition("=")[0] in refused.message
    assert reason in str(refused)


@pytest.mark.parametrize("nothing", ["0", "0%", "0.000%"])
def test_a_device_can_be_kept_out_of_auto(nothing):
    machine = Asked(gpu(0, GIB), gpu(1, GIB), cpu=ram(GIB))
    assert machine.limits("auto", f"cuda:1={nothing}") == {"cuda:0": GIB, "cpu": GIB}


def test_a_share_of_a_gpu_says_why_there_are_none():
    refused = Asked(cpu=ram(GIB), missing="nvidia-smi is not installed").refuses("cuda:0=auto")
    assert "there is no cuda:0 here: nvidia-smi is not installed" in refused.message


@pytest.mark.parametrize("word", ["cuda:0=auto", "cuda:0=99%", "cuda:1=0.5%"])
def test_a_share_of_nothing_is_refused(word):
    refused = Asked(gpu(0, 0), gpu(1, 100)).refuses(word)
    assert "that is nothing" in refused.message
    assert "free of 24.00 GiB" in refused.message
