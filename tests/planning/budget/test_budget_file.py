import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigload.devices import CPU, DISK
from bigload.documents import MAX_TOML_LINE
from bigload.errors import OptionError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.budget.budget_file import MAX_FILE_BYTES, read_budget_file

GIB = 1024**3


@pytest.fixture
def budget(tmp_path):
    """Return a function that reads a budget from a file with these contents."""

    def read(content, *others):
        path = tmp_path / "budget.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return MemoryBudget.parse([f"@{path}", *others])

    return read


def limits(budget):
    return {str(device): limit for device, limit in budget}


@pytest.mark.parametrize("heading", ["", "[max-memory]\n", "# ours\n\n[ max-memory ] # GiB\n", "\ufeff"])
def test_a_file_is_a_table_of_devices_with_a_heading_or_without(budget, heading):
    read = budget(heading + '"cuda:0" = "22GiB"\ncpu = "64 GiB"\ndisk = 1024\n1 = "5GiB"\n')
    assert limits(read) == {"cuda:0": 22 * GIB, "cuda:1": 5 * GIB, "cpu": 64 * GIB, "disk": 1024}


def test_an_inline_table_is_a_table(budget):
    assert limits(budget('max-memory = {cpu = "1GiB"}')) == {"cpu": GIB, "disk": None}


def test_a_file_may_ask_for_shares(budget):
    found = budget('cpu = "50%"').detected
    assert [memory.device for memory in found] == [CPU]


def test_a_file_mixes_with_words(budget):
    assert limits(budget("cpu = 1024", "cuda:0=5,disk=9")) == {"cuda:0": 5, "cpu": 1024, "disk": 9}


def test_a_file_is_read_in_the_python_form_too(tmp_path):
    (tmp_path / "b.toml").write_text("cpu = 7")
    assert MemoryBudget.of(f"@{tmp_path / 'b.toml'}").get(CPU) == 7


def test_a_tilde_is_the_home_folder_because_shells_leave_it_after_an_at_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "b.toml").write_text("cpu = 7")
    assert MemoryBudget.of("@~/b.toml").get(CPU) == 7


def test_a_pipe_will_do(tmp_path):
    ends = os.pipe()
    os.write(ends[1], b"disk = 8\ncpu = 7")
    os.close(ends[1])
    assert MemoryBudget.of(f"@/dev/fd/{ends[0]}").get(DISK) == 8
    os.close(ends[0])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "names no device"),
        ("# nothing yet\n", "names no device"),
        ("[max-memory]\n", "names no device"),
        ('cpu = "1GiB"\ncuda:0 = "22GiB"\n', "line 2"),
        ('cuda:0 = "22GiB"\n', "a colon needs quotes"),
        ('cpu = "1GiB"\ncpu = "2GiB"\n', "line 2"),
        ('"cuda" = "1GiB"\n"cuda:0" = "1GiB"\n', "cuda:0 has two limits"),
        ('{"cpu": "1GiB"}', "not valid TOML"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"cpu = 'a\x00'", "not valid TOML"),
        ('gpu0 = "1GiB"', 'unknown device "gpu0"'),
        ('[max_memory]\ncpu = "1GiB"', '"max_memory" is a table'),
        ('cpu = "1GiB"\n[max-memory]\n"cuda:0" = "1GiB"', '"cpu" stands outside of [max-memory]'),
        ('[max-memory]\ncpu = "1GiB"\n[other]\n', '"other" stands outside'),
        ("max-memory = 5", "max-memory is a number; expected a table"),
        ("[max-memory.cpu]", '"cpu" is a table; expected a size'),
        ("cuda.0 = 5", '"cuda" is a table'),
        ("cpu = 1.5", '"cpu" is a number with a fraction'),
        ("cpu = nan", "a number with a fraction"),
        ("cpu = true", '"cpu" is true or false'),
        ("cpu = [1]", "a list"),
        ("cpu = 2026-01-01", "a date or time"),
        ("cpu = -5", "at least 0 bytes"),
        ('cpu = "-5"', "not a size"),
        ('cpu = ""', "not a size"),
        ('cpu = "22Gb"', "gigabits"),
        ('cpu = "22G"', "two readings"),
        ('cpu = "150%"', "more than all"),
        ('cpu = "@budget.toml"', "not a size"),
        ('cpu = "1GiB,cuda:0=1GiB"', "not a size"),
        ("cpu = 0x" + "f" * 500, "more than any device has"),
        ("cpu = " + "9" * 900, "more than any device has"),
        ("cpu = '''\n" + "9\n" * 4400 + "'''", "not a size"),
        ("cpu = " + "[" * 990, "nested too deeply"),
        ("cpu = \n" + "[\n" * 5000, "not valid TOML"),
        ("a = [" + "\n[" * 5000, "nested too deeply"),
        ("a." * 4000 + "cpu = 1", f"line 1 has {8000 + 7} characters"),
        ("#" * (MAX_TOML_LINE + 1), "line 1 has"),
        ("#\n" * MAX_FILE_BYTES, "more than 16.0 KiB"),
        ('"' + "x" * 500 + '" = 1', "unknown device"),
    ],
)
def test_a_file_that_is_no_budget_is_refused_by_name_and_with_what_is_wrong(budget, content, says):
    with pytest.raises(OptionError) as refused:
        budget(content)
    assert says in str(refused.value)
    assert "budget.toml" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_limit_beside_one_in_a_file_is_refused_with_both_places(budget):
    with pytest.raises(OptionError) as refused:
        budget('cpu = "1GiB"', "cpu=2GiB")
    assert refused.value.message == "cpu has two limits"
    assert 'budget.toml: "cpu" = 1GiB' in refused.value.details[0]
    assert refused.value.details[1] == "--max-memory cpu=2GiB"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.toml", "No such file"),
        (".", "directory"),
        ("/dev/zero", "more than 16.0 KiB"),
        ("null\0byte", "null"),
        ("~nobody-of-that-name/b.toml", "home directory"),
        ("x" * 5000, "too long"),
    ],
)
def test_a_path_that_cannot_be_read_is_refused(path, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=says):
        read_budget_file(path)


def test_an_at_sign_alone_is_no_file():
    with pytest.raises(OptionError, match='"@" is not a memory limit'):
        MemoryBudget.parse(["@"])


@pytest.fixture(scope="module")
def any_file(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "budget.toml"


lines = st.one_of(
    st.text(max_size=30),
    st.builds(
        "{} = {}".format, st.sampled_from(["cpu", '"cuda:0"', "0", "[max-memory]\ndisk", "a.b"]), st.text(max_size=20)
    ),
    st.builds('cpu = "{}"'.format, st.sampled_from(["1GiB", "5", "auto", "9" * 60, "1 kB"])),
)


@given(st.one_of(st.binary(max_size=200), st.lists(lines, max_size=5).map(lambda parts: "\n".join(parts).encode())))
@example(b'cpu = "1GiB"')
def test_any_file_is_a_budget_or_refused(any_file, content):
    any_file.write_bytes(content)
    try:
        read = read_budget_file(str(any_file))
    except OptionError:
        return
    assert read
    assert all(isinstance(key, str) and type(value) in (str, int) for key, value in read)
