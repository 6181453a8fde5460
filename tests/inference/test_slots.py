from turnfold.embedded.inference.slots import SlotTable


def test_the_slot_with_the_longest_common_prefix_is_taken() -> None:
    table = SlotTable(3)
    slots = [table.take([7])[0] for _ in range(3)]
    table.release(slots[0], [1, 9])
    table.release(slots[1], [1, 2, 3, 4])
    table.release(slots[2], [1, 2, 8])
    assert table.take([1, 2, 3, 7]) == (slots[1], 3)


def test_one_prompt_token_is_always_left_to_compute() -> None:
    table = SlotTable(1)
    slot, _ = table.take([5])
    table.release(slot, [1, 2, 3, 4])
    assert table.take([1, 2, 3]) == (slot, 2)


def test_without_a_common_prefix_the_slot_that_lay_idle_longest_is_taken() -> None:
    table = SlotTable(2)
    first, second = table.take([7])[0], table.take([7])[0]
    table.release(second, [1, 2])
    table.release(first, [3, 4])
    assert table.take([9, 9]) == (second, 0)


def test_another_cache_salt_shares_nothing() -> None:
    table = SlotTable(1)
    slot, _ = table.take([5], "blue")
    table.release(slot, [1, 2, 3], "blue")
    assert table.take([1, 2, 3], "red") == (slot, 0)


def test_nothing_is_reused_after_forget() -> None:
    table = SlotTable(2)
    slot, _ = table.take([5])
    table.release(slot, [1, 2, 3])
    table.forget()
    assert table.take([1, 2, 3])[1] == 0
    assert table.num_free == 1
