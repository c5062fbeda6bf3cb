"""Keys in many small parts: the same as a dictionary, a set and a list, and no part is long."""

from hypothesis import given
from hypothesis import strategies as st

from kvhold.testing.tier import make_key
from kvhold.tiers.table import KEYS_A_PART, KeyList, KeySet, KeyTable

NUMBERS = st.integers(0, 30)


@given(st.lists(st.tuples(st.sampled_from(["set", "delete", "empty"]), NUMBERS), max_size=60))
def test_a_table_is_a_dictionary(steps: list[tuple[str, int]]) -> None:
    table, model = KeyTable[int](), dict[bytes, int]()
    for at, (what, number) in enumerate(steps):
        key = make_key(number)
        if what == "set":
            table[key] = model[key] = at
        elif what == "delete" and key in model:
            del table[key], model[key]
        elif what == "empty":
            assert sorted(value for part in table.emptied() for value in part) == sorted(
                model.values()
            )
            model.clear()
        assert len(table) == len(model)
        assert [table.get(make_key(n)) for n in range(31)] == [
            model.get(make_key(n)) for n in range(31)
        ]
        assert (
            sorted(value for part in table.parts() for value in part)
            == sorted(table.values())
            == sorted(model.values())
        )


@given(st.lists(st.lists(NUMBERS, max_size=10), max_size=10))
def test_a_set_knows_which_keys_are_new_until_it_is_emptied(calls: list[list[int]]) -> None:
    keys, model = KeySet(), dict[bytes, None]()
    for numbers in calls:
        given_keys = [make_key(number) for number in numbers]
        assert keys.add(given_keys) == [
            key for key in dict.fromkeys(given_keys) if key not in model
        ]
        model |= dict.fromkeys(given_keys)
    assert sum(keys.emptied()) == len(model)
    assert keys.add(list(model)) == list(model)


@given(st.integers(0, 3 * KEYS_A_PART), st.integers(0, 3 * KEYS_A_PART))
def test_a_list_keeps_the_order_in_short_parts(num_given: int, num_added: int) -> None:
    numbers = range(num_given + num_added)
    listed = KeyList([bytes([number % 256]) for number in numbers[:num_given]])
    begun = [listed.append(bytes([number % 256])) for number in numbers[num_given:]]
    assert len(listed) == len(numbers)
    assert b"".join(key for part in listed.parts for key in part) == bytes(
        number % 256 for number in numbers
    )
    assert all(len(part) == KEYS_A_PART for part in listed.parts[:-1])
    assert begun.count(True) == len(listed.parts) - -(-num_given // KEYS_A_PART)
    parts = list(listed.taken())
    assert b"".join(key for part in reversed(parts) for key in part) == bytes(
        number % 256 for number in numbers
    )
    assert (len(listed), listed.parts) == (0, [])
