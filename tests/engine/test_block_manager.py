import pytest

from batchgen.engine.block_manager import BlockManager
from batchgen.errors import BatchgenError


def test_a_page_is_free_when_its_last_reference_is_gone() -> None:
    blocks = BlockManager(2)
    page = blocks.allocate()
    blocks.hold([page])
    assert blocks.is_shared(page) and blocks.num_used == 1
    blocks.release([page])
    assert not blocks.is_shared(page) and blocks.num_used == 1
    blocks.release([page])
    assert (blocks.num_used, blocks.num_free) == (0, 2)


def test_pages_are_given_out_once() -> None:
    blocks = BlockManager(3)
    assert sorted(blocks.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(IndexError):
        blocks.allocate()


def test_integrity_holds_for_the_true_holders() -> None:
    blocks = BlockManager(3)
    a, b = blocks.allocate(), blocks.allocate()
    blocks.hold([a])
    blocks.check_integrity([[a, b], [a]])


@pytest.mark.parametrize("holders", [[[0]], [[0, 0], [1]], [[0], [1], [2]], []])
def test_integrity_names_the_page(holders: list[list[int]]) -> None:
    blocks = BlockManager(3)
    assert [blocks.allocate(), blocks.allocate()] == [0, 1]
    with pytest.raises(BatchgenError, match=r"page \d is held"):
        blocks.check_integrity(holders)


def test_a_page_released_twice_is_found() -> None:
    blocks = BlockManager(2)
    page = blocks.allocate()
    blocks.release([page])
    blocks.release([page])
    with pytest.raises(BatchgenError):
        blocks.check_integrity([])


def test_whoever_wants_to_know_is_told_of_a_page_before_it_is_free():
    told = []
    blocks = BlockManager(2, lambda page: told.append((page, blocks.num_free)))
    page = blocks.allocate()
    blocks.hold([page])
    blocks.release([page])
    assert told == []
    blocks.release([page])
    assert told == [(page, 1)]
