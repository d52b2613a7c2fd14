"""The block manager: all-or-nothing growth, contiguity, nothing lost."""

from __future__ import annotations

import random

import pytest

from dsde.blocks import BlockManager, BlockTable


def test_reserve_is_all_or_nothing():
    manager, table = BlockManager(4, 8), BlockTable()
    assert manager.reserve(table, 17)
    assert len(table.blocks) == 3
    assert not manager.reserve(table, 33)
    assert len(table.blocks) == 3 and manager.num_free == 1
    assert manager.reserve(table, 32)


def test_trim_keeps_the_blocks_that_the_length_needs():
    manager, table = BlockManager(8, 4), BlockTable()
    manager.reserve(table, 20)
    manager.trim(table, 9)
    assert len(table.blocks) == 3
    manager.trim(table, 0)
    assert table.blocks == [] and manager.num_free == 8


def test_sequences_grow_side_by_side_without_scattering():
    manager = BlockManager(64, 4)
    tables = [BlockTable() for _ in range(4)]
    for length in range(1, 33):
        for table in tables:
            assert manager.reserve(table, length)
    assert all(t.contiguous for t in tables)


def test_a_crowded_pool_scatters_but_serves():
    manager, a, b = BlockManager(6, 1), BlockTable(), BlockTable()
    manager.reserve(a, 2)
    manager.reserve(b, 2)
    manager.reserve(a, 4)
    assert not a.contiguous or a.blocks == [0, 1, 2, 3]
    assert manager.num_free == 0
    manager.check([a, b])


def test_random_use_partitions_the_pool():
    rng = random.Random(0)
    manager = BlockManager(40, 4)
    tables = [BlockTable() for _ in range(9)]
    for _ in range(3000):
        table = rng.choice(tables)
        if rng.random() < 0.6:
            manager.reserve(table, rng.randrange(60))
        else:
            manager.trim(table, rng.randrange(60))
        manager.check(tables)


def test_check_finds_a_lost_and_a_doubled_block():
    manager, a, b = BlockManager(4, 1), BlockTable(), BlockTable()
    manager.reserve(a, 2)
    manager.check([a, b])
    with pytest.raises(RuntimeError, match="lost"):
        manager.check([b])
    b.blocks = [a.blocks[0]]
    with pytest.raises(RuntimeError, match="twice"):
        manager.check([a, b])


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="kv_blocks"):
        BlockManager(0, 8)
