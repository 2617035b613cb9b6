"""What torch's CUDA allocator would hold: its rules, replayed over tensors that come and go, in plain Python.

The rules are those of torch 2.13's c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes in steps of 512
bytes, tensors up to 1 MiB in a pool of their own, segments of 2 and 20 MiB or of the tensor's own size, the smallest free
block that fits, split where enough is left, merged when its neighbours are free. Nothing is given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from gptfit.units import MIB

STEP_BYTES = 512
SMALL_BYTES = 1 * MIB  # tensors up to here share segments of SMALL_SEGMENT
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for tensors under OWN_SEGMENT; larger ones get a segment of their own size
OWN_SEGMENT = 10 * MIB
SEGMENT_STEP = 2 * MIB


@dataclass(eq=False)
class Piece:
    """A stretch of a segment, in use or free; neighbours are known so that free ones can be joined."""

    segment: int
    start: int
    size: int
    is_small: bool
    is_free: bool = True
    before: Piece | None = None
    after: Piece | None = None


# Free pieces in the order of the allocator's search: the smallest first, then the oldest segment.
_FreeList = list[tuple[int, int, int, Piece]]


@dataclass
class CachingAllocator:
    """Tensors are taken and given back; what the card has lost to it only grows."""

    is_expandable: bool = (
        False  # PYTORCH_ALLOC_CONF=expandable_segments:True, one segment per pool that grows at its end
    )
    reserved: int = 0
    allocated: int = 0
    peak_allocated: int = 0
    _free: dict[bool, _FreeList] = field(default_factory=lambda: {True: [], False: []})
    _last: dict[bool, Piece | None] = field(default_factory=lambda: {True: None, False: None})
    _segments: int = 0

    def take(self, n_bytes: float) -> Piece:
        size = max(STEP_BYTES, -(-int(n_bytes) // STEP_BYTES) * STEP_BYTES)
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size,))
        piece = free.pop(place)[-1] if place < len(free) else self._grow(size, is_small)
        rest = piece.size - size
        if rest >= STEP_BYTES if is_small or self.is_expandable else rest > SMALL_BYTES:
            self._split(piece, size)
        piece.is_free = False
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return piece

    def give_back(self, *pieces: Piece) -> None:
        for piece in pieces:
            assert not piece.is_free, "given back twice"
            self.allocated -= piece.size
            piece.is_free = True
            self._keep(self._joined(piece))

    def _grow(self, size: int, is_small: bool) -> Piece:
        """New memory from the driver."""
        if self.is_expandable:
            return self._grow_at_the_end(size, is_small)
        if is_small:
            held = SMALL_SEGMENT
        else:
            held = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SEGMENT_STEP) * SEGMENT_STEP
        self._segments += 1
        self.reserved += held
        return Piece(self._segments, 0, held, is_small)

    def _grow_at_the_end(self, size: int, is_small: bool) -> Piece:
        """As many pages as are missing behind the last piece, which is used where it is free."""
        page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        last = self._last[is_small]
        has_room = last is not None and last.is_free
        missing = -(-(size - (last.size if last and has_room else 0)) // page) * page
        self.reserved += missing
        if last is not None and has_room:
            self._drop(last)
            last.size += missing
            return last
        piece = Piece(0, last.start + last.size if last else 0, missing, is_small, before=last)
        if last is not None:
            last.after = piece
        self._last[is_small] = piece
        return piece

    def _split(self, piece: Piece, size: int) -> None:
        rest = Piece(
            piece.segment, piece.start + size, piece.size - size, piece.is_small, before=piece, after=piece.after
        )
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.size = rest, size
        if self._last[piece.is_small] is piece:
            self._last[piece.is_small] = rest
        self._keep(rest)

    def _joined(self, piece: Piece) -> Piece:
        """The piece with its free neighbours."""
        for other in (piece.before, piece.after):
            if other is None or not other.is_free:
                continue
            self._drop(other)
            first, second = (other, piece) if other is piece.before else (piece, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            if self._last[piece.is_small] is second:
                self._last[piece.is_small] = first
            piece = first
        return piece

    def _keep(self, piece: Piece) -> None:
        insort(self._free[piece.is_small], (piece.size, piece.segment, piece.start, piece))

    def _drop(self, piece: Piece) -> None:
        free = self._free[piece.is_small]
        del free[bisect_left(free, (piece.size, piece.segment, piece.start))]
