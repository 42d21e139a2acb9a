"""Sizes as people write them, and the exit codes of the error tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream import errors
from moestream.units import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("1.1GB", 1_100_000_000),
        ("800M", 800 << 20),
        ("1.5 GiB", 3 << 29),
        (" 2g ", 2 << 30),
        ("1kb", 1000),
        ("1kib", 1024),
        ("1T", 1 << 40),
        ("1073741824", 1 << 30),
        ("512 B", 512),
        ("4B", 4),
        (7, 7),
    ],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 XB", "-1G", "0", "0.0G", 0, -5, "1,5G", "1e9", "4GiBs", True, None, 1.5, "half"]
)
def test_parse_size_refuses(text: object) -> None:
    with pytest.raises(errors.UsageError) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4", "4 would be 4 B; write 4GB or 4GiB"),
        (" 1.5 ", "1.5 would be 2 B; write 1.5GB or 1.5GiB"),
        ("0.5", "write 0.5GB or 0.5GiB"),
        ("8000", "8000 would be 8.00 kB; write 8000MB or 8000MiB"),
        ("1048575", "write 1048575MB"),
    ],
)
def test_a_number_too_small_for_bytes_lacks_its_unit(text: str, meant: str) -> None:
    with pytest.raises(errors.UsageError, match="a size without its unit") as caught:
        parse_size(text)
    assert meant in str(caught.value)


@given(st.integers(1 << 20, 1 << 50))
def test_a_number_of_bytes_is_itself(count: int) -> None:
    assert parse_size(count) == parse_size(str(count)) == parse_size(f"{count}B") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (553_000, "553 kB"),
        (1_100_000_000, "1.10 GB"),
        (23_450_000_000, "23.4 GB"),
        (4_300_000_000_000, "4.30 TB"),
        (-2_000_000, "-2.00 MB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_exit_codes() -> None:
    codes = {
        errors.MoestreamError: 4,
        errors.UsageError: 2,
        errors.RefusedError: 3,
        errors.ModelError: 3,
        errors.BudgetError: 3,
        errors.AbiError: 3,
        errors.EngagementError: 3,
    }
    for kind, code in codes.items():
        assert issubclass(kind, errors.MoestreamError)
        assert kind("text").exit_code == code
    assert errors.BudgetError("too little", 5).smallest_bytes == 5


@pytest.mark.parametrize("text", ["9" * 400, "2000000TB", str(2**61)])
def test_a_size_beyond_any_disk_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match="more than 2\\^60"):
        parse_size(text)
