"""Block manager: which KV blocks belong to which sequence.

A block is ``block_size`` token positions in the key-value stores of target *and* draft: both models hold the same
positions of a sequence, so one table serves both. Any block may follow any other, but the manager places a new
sequence in the middle of the longest free run and lets it grow to the right. Sequences then mostly stay contiguous, and
attention reads their keys as a view; a gathered copy is needed only where the pool is crowded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence in order of position."""

    blocks: list[int] = field(default_factory=list)

    @property
    def contiguous(self) -> bool:
        """Whether the blocks are neighbours in the pool, so that positions map to one range of slots."""
        b = self.blocks
        return not b or b == list(range(b[0], b[0] + len(b)))


class BlockManager:
    """Hands out and takes back blocks; never loses one.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool.
    block_size : int
        Token positions a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"kv_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self._free = np.ones(num_blocks, dtype=bool)

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` positions need."""
        return -(-length // self.block_size)

    def room(self, table: BlockTable) -> int:
        """Positions that `table` could reach if it took every free block."""
        return (len(table.blocks) + self.num_free) * self.block_size

    def reserve(self, table: BlockTable, length: int) -> bool:
        """Grow `table` to hold `length` positions; all or nothing. Returns whether it does now."""
        missing = self.blocks_for(length) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = self._next_block(table)
            self._free[block] = False
            self.num_free -= 1
            table.blocks.append(block)
        return True

    def trim(self, table: BlockTable, length: int) -> None:
        """Give back the blocks behind the first `length` positions."""
        keep = self.blocks_for(length)
        if keep < len(table.blocks):
            tail = table.blocks[keep:]
            del table.blocks[keep:]
            self._free[tail] = True
            self.num_free += len(tail)

    def _next_block(self, table: BlockTable) -> int:
        if table.blocks:
            right = table.blocks[-1] + 1
            if right < self.num_blocks and self._free[right]:
                return right
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free, [False]))))
        starts, ends = edges[::2], edges[1::2]
        longest = int(np.argmax(ends - starts))
        start, end = int(starts[longest]), int(ends[longest])
        # The first half of the run stays with the sequence on its left, if there is one, to grow into.
        return start if start == 0 else (start + end) // 2

    def check(self, tables: list[BlockTable]) -> None:
        """Raise RuntimeError unless free blocks and `tables` partition the pool."""
        held = [b for t in tables for b in t.blocks]
        if len(set(held)) != len(held):
            raise RuntimeError("a KV block is held twice")
        if self._free[held].any() or len(held) + self.num_free != self.num_blocks or self._free.sum() != self.num_free:
            raise RuntimeError(f"KV blocks lost: {len(held)} held + {self.num_free} free of {self.num_blocks}")
