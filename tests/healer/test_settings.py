"""Which partitions a healer owns."""

import pytest

from turnfold.healer.settings import Settings
from turnfold.schemas.settings import SettingsError


@pytest.mark.parametrize(
    ("text", "owned"),
    [("", [0, 1, 2, 3]), ("0-1,3", [0, 1, 3]), ("2", [2]), (" 3 , 1-2,1 ", [1, 2, 3])],
)
def test_numbers_and_ranges_name_partitions(text: str, owned: list[int]) -> None:
    assert Settings(partitions=text).owned([0, 1, 2, 3]) == owned


@pytest.mark.parametrize("text", ["a", "1-", "0,,1", "-1", "0-x"])
def test_text_that_names_no_partitions_says_what_was_expected(text: str) -> None:
    with pytest.raises(SettingsError, match="expected numbers and ranges, such as 0-1 or 0,3"):
        Settings(partitions=text).owned([0, 1])


@pytest.mark.parametrize(("text", "unknown"), [("0-4", [2, 3, 4]), ("7", [7])])
def test_partitions_that_do_not_exist_are_refused(text: str, unknown: list[int]) -> None:
    with pytest.raises(SettingsError) as error:
        Settings(partitions=text).owned([0, 1])
    assert f"has partitions 0 to 1, not {unknown}" in str(error.value)
