import pytest

from bigload.units import counted, format_count, format_rate, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("22GiB", 22 * 1024**3),
        ("1 TiB", 1024**4),
        ("512MiB", 512 * 1024**2),
        ("3KiB", 3072),
        ("23.6GB", 23_600_000_000),
        ("2TB", 2 * 10**12),
        ("7MB", 7 * 10**6),
        ("1kB", 1000),
        ("1KB", 1000),
        ("8B", 8),
        ("8b", 8),
        ("4096", 4096),
        ("  1.5 MB ", 1_500_000),
        ("0", 0),
    ],
)
def test_a_size_reads_as_its_unit_says(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["22GIB", "22gib", "22Gib"])
def test_binary_units_may_be_written_in_any_case(text):
    assert parse_size(text) == 22 * 1024**3


def test_a_fraction_of_a_byte_is_rounded_down():
    assert parse_size("1.9999KiB") == 2047


def test_a_decimal_fraction_is_exact():
    assert parse_size("0.1GB") == 100_000_000


@pytest.mark.parametrize("text", ["22G", "22g", "22Gb", "22gb", "22M", "22T", "22k", "22Kb"])
def test_a_unit_with_two_readings_is_refused(text):
    with pytest.raises(ValueError, match=r"GiB|MiB|TiB|KiB"):
        parse_size(text)


def test_a_refused_unit_comes_with_both_spellings():
    with pytest.raises(ValueError, match=r"22GB \(20\.49 GiB\) or 22GiB"):
        parse_size("22G")


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "-1GiB", "+1GiB", "1e9", "1,5GB", ".5GB", "5.GB", "1 2GB", "٣GiB", "inf", "nan"]
)
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match=r"not a size|unknown unit"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1PiB", "1EB", "1GiBs", "1parsec"])
def test_an_unknown_unit_is_refused_with_the_known_ones(text):
    with pytest.raises(ValueError, match=r"unknown unit .* GiB"):
        parse_size(text)


def test_a_size_beyond_all_measure_is_refused_like_any_other():
    with pytest.raises(ValueError, match="9"):
        parse_size("9" * 400 + "G")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2, "1.00 MiB"),
        (1024**3, "1.00 GiB"),
        (5000 * 1024**3, "5000.00 GiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_binary_unit_up_to_gib(num_bytes, text):
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.00 K"), (10**6, "1.00 M"), (10**9, "1.00 B")]
)
def test_a_count_of_parameters_is_shown_as_model_names_spell_it(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files")])
def test_a_counted_noun_agrees_with_its_number(count, text):
    assert counted(count, "file") == text


def test_a_rate_is_bytes_per_second():
    assert format_rate(3 * 1024**3, 2.0) == "1.50 GiB/s"


def test_a_rate_over_no_time_is_a_dash():
    assert format_rate(1, 0.0) == "-"
